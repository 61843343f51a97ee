"""Samples as units: what is packed together, and what losses are divided by.

A *unit* holds all samples of one rollout, because sequence-level objectives need the whole rollout in one micro-batch. A rollout of
several samples that exceeds a row is split between its samples if its objective looks at single tokens (`SampleLosses.splits`): the loss
is the same sum then.

A model that computes every sample beside the others, padded to the longest of the row (the layout `rows`), takes (number of samples) x
(longest sample) tokens. So samples of similar length belong together: the rollouts are sorted by their longest sample, and a row is a run
of neighbours (`fill_padded`). The padding of all rows is then at most about `tokens` · ln(longest / shortest), however many samples there
are. That does not hold for rollouts of several samples of unlike lengths that stay in one row: all are padded to the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlx.types import STREAMS, Count, LossCounts, SampleLosses, TrainingSample

Cost = Callable[[Sequence[int]], float]
"""The time that a rank takes for samples of these lengths in one row, in any unit. `sum`: tokens alone."""


@dataclass(slots=True)
class Unit:
    """The samples of one rollout, or of a part of it."""

    samples: list[TrainingSample]
    lengths: list[int]  # of its samples
    tokens: int  # space that it takes in a row
    cost: float  # time that it takes of a rank, see `Cost`
    own: int  # its sampled tokens that belong to its objective's own loss
    group_length: int  # the same over its group
    loss: SampleLosses
    elsewhere: int = 0  # sampled tokens of its rollout in other units


def streams_of(samples: Sequence[TrainingSample]) -> list[str]:
    """The optional streams that some of the samples have."""
    return [name for name in STREAMS if any(getattr(sample, name) is not None for sample in samples)]


def trained(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """Samples with a token that a loss reads."""
    return [sample for sample in samples if sample.loss_mask.any() or (sample.ce_weights is not None and sample.ce_weights.any())]


def own_tokens(sample: TrainingSample, loss: SampleLosses) -> int:
    """Sampled tokens that belong to the own loss of the sample's objective."""
    return members(sample, sample.ref_kl_weights if loss.kind == "ref_kl" else sample.policy_weights)


def members(sample: TrainingSample, weights: np.ndarray | None) -> int:
    """Sampled tokens with a weight."""
    return int(np.count_nonzero(sample.loss_mask if weights is None else sample.loss_mask & (weights != 0)))


def counts_of(groups: list[list[Unit]]) -> LossCounts:
    """What losses are divided by, over all ranks."""

    def count(lengths: list[list[int]]) -> Count:
        return Count(
            tokens=sum(map(sum, lengths)),
            sequences=sum(length > 0 for group in lengths for length in group),
            groups=sum(any(group) for group in lengths),
        )

    def of_units(length: Callable[[Unit], int]) -> Count:
        return count([[length(unit) for unit in group] for group in groups])

    kinds = sorted({unit.loss.kind for group in groups for unit in group})
    kl = of_units(lambda unit: sum(members(sample, sample.ref_kl_weights) for sample in unit.samples) if unit.loss.has_kl else 0)
    learned = [s.ce_weights for group in groups for unit in group if unit.loss.has_ce for s in unit.samples if s.ce_weights is not None]
    return LossCounts(
        all=of_units(lambda unit: unit.own),
        own={kind: of_units(lambda unit, kind=kind: unit.own if unit.loss.kind == kind else 0) for kind in kinds},  # type: ignore[misc]
        kl=kl,
        ce_tokens=sum(int(np.count_nonzero(weights)) for weights in learned),
    )


def groups_of(samples: Sequence[TrainingSample], loss_of: Callable[[str], SampleLosses], cost: Cost) -> list[list[Unit]]:
    """Samples by group, then by rollout, in order of first appearance."""
    groups: dict[int, dict[int, list[TrainingSample]]] = {}
    for sample in samples:
        groups.setdefault(sample.group, {}).setdefault(sample.member, []).append(sample)
    found = []
    for group in groups.values():
        of = {member: loss_of(unit[0].env) for member, unit in group.items()}
        own = {member: sum(own_tokens(sample, of[member]) for sample in unit) for member, unit in group.items()}
        length = sum(own.values())
        lengths = {member: [len(sample.token_ids) for sample in unit] for member, unit in group.items()}
        found.append(
            [
                Unit(unit, lengths[member], sum(lengths[member]), cost(lengths[member]), own[member], length, of[member])
                for member, unit in group.items()
            ]
        )
    return found


def split(groups: list[list[Unit]], tokens: int, cost: Cost) -> list[list[Unit]]:
    """The groups, with rollouts that exceed a row in parts where their objective allows it. A sample is never split.

    Samples with streams stay together: how many of their tokens belong to which loss is counted by rollout.
    """

    def parts(unit: Unit) -> list[Unit]:
        if unit.tokens <= tokens or len(unit.samples) == 1 or not unit.loss.splits or streams_of(unit.samples):
            return [unit]
        bins: list[list[TrainingSample]] = []
        for sample in unit.samples:  # in their order: a later one often repeats the one before it
            if not bins or sum(len(one.token_ids) for one in bins[-1]) + len(sample.token_ids) > tokens:
                bins.append([])
            bins[-1].append(sample)
        found = []
        for samples in bins:
            lengths, own = [len(one.token_ids) for one in samples], sum(members(one, None) for one in samples)
            part = replace(unit, samples=samples, lengths=lengths, tokens=sum(lengths), cost=cost(lengths), own=own)
            found.append(replace(part, elsewhere=unit.own - own))
        return found

    return [[part for unit in group for part in parts(unit)] for group in groups]


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
