"""Rows for models that compute every sample beside the others, padded to the longest of the row (the layout `rows`). Numbers only.

Such a row takes (number of samples) x (longest sample) tokens, not the sum of lengths. So samples of similar length belong together: the
rollouts are sorted by their longest sample, and a row is a run of neighbours. The padding of all rows is then at most about
`tokens` · ln(longest / shortest), however many samples there are.

That does not hold for rollouts of several samples of unlike lengths that stay in one row: all are padded to the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

HALVINGS = 30  # of the interval in which the smallest cost of the costliest row is searched


def fill_padded(units: Sequence[Sequence[int]], ranks: int, tokens: int, cost: Callable[[Sequence[int]], float]) -> list[list[int]]:
    """Distribute units over rows of at most `tokens` tokens, padding included. `units`: the lengths of each one's samples.

    Returns the units of each row by number; the costliest row comes first. The number of rows is the smallest multiple of `ranks` for
    neighbours by length, and the costliest row is as cheap as it can be with that number. A unit that exceeds `tokens` gets its own row.
    """
    longest, order = [max(unit) for unit in units], sorted(range(len(units)), key=lambda i: (-max(units[i]), i))
    of_one = {length: cost([length]) for length in set(longest)}
    rows = _neighbours(units, order, tokens, float("inf"), of_one)
    num_rows = max(1, -(-len(rows) // ranks)) * ranks

    def costs(rows: list[list[int]]) -> list[float]:
        return [sum(len(units[i]) for i in row) * of_one[longest[row[0]]] for row in rows]

    least, most = max((len(unit) * of_one[max(unit)] for unit in units), default=0.0), max(costs(rows), default=0.0)
    for _ in range(HALVINGS if rows else 0):
        middle = (least + most) / 2
        tried = _neighbours(units, order, tokens, middle, of_one)
        if len(tried) <= num_rows:
            rows, most = tried, middle
        else:
            least = middle
    rows += [[] for _ in range(num_rows - len(rows))]
    spent = costs([row for row in rows if row]) + [0.0] * num_rows
    return [sorted(rows[number]) for number in sorted(range(num_rows), key=lambda number: (-spent[number], number))]


def _neighbours(
    units: Sequence[Sequence[int]], order: Sequence[int], tokens: int, most: float, of_one: dict[int, float]
) -> list[list[int]]:
    """Fill rows in this order, which begins with the longest, each until a unit more would exceed `tokens`, or the cost `most`."""
    rows: list[list[int]] = []
    samples = longest = 0
    for i in order:
        samples += len(units[i])
        if not rows or samples * longest > tokens or samples * of_one[longest] > most:
            rows.append([])
            samples, longest = len(units[i]), max(units[i])
        rows[-1].append(i)
    return rows
