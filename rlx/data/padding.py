"""Rows for models that compute every sample beside the others, padded to the longest of the row (the layout `rows`). Numbers only.

Such a row takes (number of samples) x (longest sample) tokens, not the sum of lengths. So samples of similar length belong together: the
rollouts are sorted by their longest sample, and a row is a run of neighbours. The padding of all rows is then at most about
`tokens` · ln(longest / shortest), however many samples there are.

That does not hold for rollouts of several samples of unlike lengths that stay in one row: all are padded to the longest. Where such a row
exceeds the limit, a warning says what it takes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)

HALVINGS = 30  # of the interval in which the smallest cost of the costliest row is searched
_said = [0]  # tokens of the largest row that this process has warned of


def fill_padded(units: Sequence[Sequence[int]], ranks: int, tokens: int, cost: Callable[[Sequence[int]], float]) -> list[list[int]]:
    """Distribute units over rows of at most `tokens` tokens, padding included. `units`: the lengths of each one's samples.

    Returns the units of each row by number; the costliest row comes first. The number of rows is the smallest multiple of `ranks` for
    neighbours by length, and the costliest row is as cheap as it can be with that number. A unit that exceeds `tokens` gets its own row.
    """
    _warn_of_the_largest(units, tokens)
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


def _warn_of_the_largest(units: Sequence[Sequence[int]], tokens: int) -> None:
    """Say how large a row becomes that one rollout makes larger than `tokens`; again only for a larger one."""
    unit = max(units, key=lambda unit: len(unit) * max(unit), default=[0])
    size = len(unit) * max(unit)
    if size > max(tokens, _said[0], sum(unit)):
        _said[0] = size
        log.warning(
            "a rollout of %d samples takes a row of %d tokens, more than trainer.micro_batch_tokens=%d: its samples have %d tokens, but "
            "this model pads each to the longest, %d, and objectives need a rollout in one row. A conversation that only appends messages "
            "is one sample, without padding",
            *(len(unit), size, tokens, sum(unit), max(unit)),
        )
