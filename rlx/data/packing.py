"""Packs the samples of a step into one rank's rows, balanced over ranks. Only this module shifts labels.

    samples ─► units (rollouts) by group ─► pieces of groups ─► rows for all ranks, as lists of units ─► this rank's rows as arrays

Every rank derives all rows and their owners from the same samples, and from nothing else. It then builds only its own arrays.
Uses numpy only.

Rollouts of one group stay together if they fit, so that the trainer can compute their common prompt once.

Ranks wait for each other in every row, so rows that run at the same time should take equally long. `Cost` says how long a row takes: the
trainer passes the count of its model's operations (`rlx.train.flops.Flops.work`), in which attention grows with Σ n². The same function
measures what is left (`RankBatch.imbalance`). A single rank waits for nobody: its rows are filled by tokens.

A model that computes samples beside each other, `padded` to the longest of the row, gets rows in which the padding counts, too
(`rlx.data.units`). Groups are not kept together there, because such a model cannot compute a common prompt once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from rlx.data.units import Cost, Unit, counts_of, fill_padded, groups_of, split, streams_of, trained
from rlx.types import STREAMS, MicroBatch, MiniBatch, RankBatch, SampleLosses, StepBatch, TrainingSample, check_streams

LOSSES_NAME = {"teacher_logprobs": "teacher_logp"}  # of a sample's stream, where losses call it otherwise

ONE = SampleLosses(number=0, kind="policy", has_kl=True, has_ce=True)
"""The only objective of a run; the counts of its kind are those of all."""

NOTHING = TrainingSample(
    group=0,
    member=0,
    env="none",
    token_ids=np.zeros(1, np.int32),
    loss_mask=np.zeros(1, np.bool_),
    inference_logprobs=np.zeros(1, np.float32),
    advantages=np.zeros(1, np.float32),
    temperature=np.ones(1, np.float32),
    versions=np.full(1, -1, np.int32),
)
"""One token, nothing to train."""


def pack(
    batch: StepBatch,
    *,
    rank: int,
    ranks: int,
    tokens: int,
    loss_of: Callable[[str], SampleLosses] = lambda env: ONE,
    cost: Cost = sum,
    padded: bool = False,
) -> RankBatch:
    """Pack the samples of each mini-batch (one optimizer step) into rows of at most `tokens` tokens, the same number for every rank.

    Returns the rows of `rank` (one of `ranks`) with the global counts. Every rank that packs the same batch computes the same split.
    A rollout whose samples together exceed `tokens` is split, or gets its own row, longer than `tokens`.
    Samples without a token that a loss reads are dropped. Ranks with less work get a dummy row that contributes exactly zero.
    If only some samples of a mini-batch have a stream, the others get its value in `rlx.types.STREAMS`.
    `loss_of`: what the samples of an environment are trained with. By default one objective trains all, with weights for its own loss.
    `cost`: what is balanced over several ranks, within the limit of `tokens`. Every rank must pass the same.
    `padded`: samples are computed beside each other, each with as many tokens as the longest of the row; `tokens` limits all of them.

    Raises ValueError for a sample longer than `tokens`, or one with a trainable first token (nothing predicts it).
    """
    return pack_together({0: batch}, rank=rank, ranks=ranks, tokens=tokens, loss_of={0: loss_of}, cost=cost, padded=padded)[0]


def pack_together(
    batches: Mapping[int, StepBatch],
    *,
    rank: int,
    ranks: int,
    tokens: int,
    loss_of: Mapping[int, Callable[[str], SampleLosses]],
    cost: Cost = sum,
    padded: bool = False,
) -> dict[int, RankBatch]:
    """Pack the batches of several runs, by slot, into common rows, as `pack` packs one.

    The result has every run's part: row i of mini-batch j of all runs that have a mini-batch j is one row of the model, in the order of the
    slots. A run without a sample in a row has a dummy there. Each run's counts are its own, so each is trained as if it were alone. What is
    left of imbalance is that of the common rows, the same for all runs.
    Raises the same errors.
    """
    assert 0 <= rank < ranks, (rank, ranks)
    batches = {slot: _labelled(batch, slot) for slot, batch in sorted(batches.items())}
    minis: dict[int, list[MiniBatch]] = {slot: [] for slot in batches}
    everyone: list[list[Unit]] = []  # the rows of all ranks
    for number in range(max(len(batch.mini_batches) for batch in batches.values())):
        samples = {slot: batch.mini_batches[number] for slot, batch in batches.items() if number < len(batch.mini_batches)}
        groups, common = _plan(samples, ranks, tokens, loss_of, cost, padded)
        everyone += common
        for slot, own in samples.items():
            streams = streams_of(trained(own))
            parts = [[unit for unit in row if unit.samples[0].adapter == slot] for row in _rows_of(rank, ranks, common)]
            minis[slot].append(
                MiniBatch(micro_batches=tuple(_micro_batch(part, streams, slot) for part in parts), counts=counts_of(groups[slot]))
            )
    return {slot: _rank_batch(batch, minis[slot], everyone, ranks, cost, padded) for slot, batch in batches.items()}


def check_samples(batch: StepBatch, tokens: int, used: Collection[str]) -> None:
    """Raise the ValueError that packing raises for a sample of this batch, or training for a stream that is not in `used`."""
    for samples in batch.mini_batches:
        check_streams(streams_of(trained(samples)), used)
    for sample in chain.from_iterable(batch.mini_batches):
        _check(sample, tokens)


def _labelled(batch: StepBatch, slot: int) -> StepBatch:
    """The batch with samples for the adapter in `slot`."""

    def labelled(sample: TrainingSample) -> TrainingSample:
        return sample if sample.adapter == slot else replace(sample, adapter=slot)

    return replace(batch, mini_batches=tuple(tuple(map(labelled, own)) for own in batch.mini_batches))


def _rank_batch(
    batch: StepBatch, mini_batches: Sequence[MiniBatch], rows: list[list[Unit]], ranks: int, cost: Cost, padded: bool
) -> RankBatch:
    """The batch with its rows, and with how equal the `rows` of all ranks are."""
    everything = [sample for samples in batch.mini_batches for sample in samples]
    computed = [[n for unit in row for n in unit.lengths] for row in rows]
    if padded:
        computed = [[max(lengths, default=0)] * len(lengths) for lengths in computed]
    return RankBatch(
        step=batch.step,
        mini_batches=tuple(mini_batches),
        num_tokens=sum(len(sample.token_ids) for sample in trained(everything)),
        streams=frozenset(streams_of(trained(everything))),
        sampled=not everything or any((sample.versions >= 0).any() for sample in everything),
        imbalance=_imbalance([cost(lengths) for lengths in computed], ranks),
        attention_imbalance=_imbalance([sum(n * n for n in lengths) for lengths in computed], ranks),
    )


def _plan(
    samples: Mapping[int, Sequence[TrainingSample]],
    ranks: int,
    tokens: int,
    loss_of: Mapping[int, Callable[[str], SampleLosses]],
    cost: Cost,
    padded: bool,
) -> tuple[dict[int, list[list[Unit]]], list[list[Unit]]]:
    """The groups of a mini-batch of each run, by slot, and the common rows of all ranks."""
    for sample in chain.from_iterable(samples.values()):
        _check(sample, tokens)
    balanced = cost if ranks > 1 else sum
    groups = {slot: groups_of(trained(own), loss_of[slot], balanced) for slot, own in samples.items()}
    whole = list(chain.from_iterable(groups.values()))
    return groups, _all_rows(split(whole, tokens, balanced), ranks, tokens, balanced if padded else None)


def _imbalance(costs: Sequence[float], ranks: int) -> float:
    """How much longer all ranks take than with equal rows. `costs` of the rows of all ranks: `ranks` neighbours run at the same time."""
    turns = [costs[first : first + ranks] for first in range(0, len(costs), ranks)]
    return sum(map(max, turns)) * ranks / sum(costs) if any(costs) else 1.0


def _check(sample: TrainingSample, tokens: int) -> None:
    where = f"sample of group {sample.group}, rollout {sample.member}, environment {sample.env}"
    if len(sample.token_ids) > tokens:
        raise ValueError(
            f"{where}: {len(sample.token_ids)} tokens do not fit a packed row of {tokens}; "
            "raise trainer.micro_batch_tokens (or seq_len), or lower sampling.max_tokens"
        )
    if len(sample.loss_mask) and (sample.loss_mask[0] or (sample.ce_weights is not None and sample.ce_weights[0])):
        raise ValueError(f"{where}: its first token is marked trainable, but no token before it predicts it; give the rollout a prompt")


def _all_rows(groups: list[list[Unit]], ranks: int, tokens: int, padded: Cost | None) -> list[list[Unit]]:
    """The rows of all ranks. A single rank gets the groups without any advantage in rows of their own, last: they need no backward.

    `padded`: the cost of samples, if they are computed padded.
    """

    def fill(groups: list[list[Unit]]) -> list[list[Unit]]:
        if padded is None:
            return _fill(groups, ranks, tokens)
        units = [unit for group in groups for unit in group]
        return [[units[i] for i in row] for row in fill_padded([unit.lengths for unit in units], ranks, tokens, padded)]

    moving = [group for group in groups if any(sample.advantages.any() for unit in group for sample in unit.samples)]
    if ranks > 1 or len(moving) in (0, len(groups)):
        return fill(groups)
    still = [group for group in groups if not any(sample.advantages.any() for unit in group for sample in unit.samples)]
    return fill(moving) + fill(still)


def _fill(groups: list[list[Unit]], ranks: int, tokens: int) -> list[list[Unit]]:
    """Distribute rollouts over rows; the costliest row comes first. The number of rows is a multiple of `ranks`, kept small.

    A piece is a whole group, or a run of its rollouts if the group exceeds a row or a row's fair share of the batch. Pieces are placed
    costliest first, which may need one row more for each rank than longest first. If even that has no room, they are placed longest first.
    """
    units = [unit for group in groups for unit in group]
    total, cost = sum(unit.tokens for unit in units), sum(unit.cost for unit in units)
    per_rank = least = max(1, -(-total // (ranks * tokens)))
    # Two rollouts of more than half a row never share one. Without this, a batch of long ones is tried with every number of rows up to it.
    per_rank = max(per_rank, -(-sum(2 * unit.tokens > tokens for unit in units) // ranks))
    while True:
        num_rows = per_rank * ranks
        pieces = _pieces(groups, min(tokens, max(1, -(-total // num_rows))), -(-cost // num_rows))
        costs, sizes = [sum(unit.cost for unit in piece) for piece in pieces], [sum(unit.tokens for unit in piece) for piece in pieces]
        members = _placed(costs, sizes, num_rows, tokens)
        if members is None and per_rank > least:
            members = _placed(sizes, sizes, num_rows, tokens)
        if members is not None:
            break
        per_rank += 1
    filled = [sum(costs[i] for i in row) for row in members]
    rows = [[unit for i in sorted(row) for unit in pieces[i]] for row in members]
    by_cost = sorted(range(num_rows), key=lambda row: (-filled[row], row))
    used = max(1, -(-sum(map(bool, rows)) // ranks)) * ranks  # oversized rows may leave others empty
    return [rows[row] for row in by_cost[:used]]


def _placed(costs: Sequence[float], sizes: Sequence[int], num_rows: int, tokens: int) -> list[list[int]] | None:
    """Put the costliest of the remaining pieces into the row with the lowest cost so far that has room for it, until all are placed.

    Returns the pieces of each row by number; None if there is no room. An empty row has room for any piece.
    """
    members: list[list[int]] = [[] for _ in range(num_rows)]
    taken = [0] * num_rows  # tokens
    least: list[tuple[float, int]] = [(0, row) for row in range(num_rows)]  # a heap of (cost so far, row)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        full = []
        while least and members[least[0][1]] and taken[least[0][1]] + sizes[i] > tokens:
            full.append(heapq.heappop(least))
        if not least:
            return None
        cost, row = least[0]
        members[row].append(i)
        taken[row] += sizes[i]
        heapq.heapreplace(least, (cost + costs[i], row))
        for each in full:
            heapq.heappush(least, each)
    return members


def _rows_of(rank: int, ranks: int, rows: list[list[Unit]]) -> list[list[Unit]]:
    """One rank's rows. All ranks run rows of similar cost at the same time, and alternate in which rank gets the costliest."""
    turns = range(len(rows) // ranks)
    return [rows[turn * ranks + (rank if turn % 2 == 0 else ranks - 1 - rank)] for turn in turns]


def _pieces(groups: list[list[Unit]], tokens: int, cost: float) -> list[list[Unit]]:
    """Runs of rollouts of one group with at most so many tokens and at most this cost each; a single rollout may exceed both."""
    pieces: list[list[Unit]] = []
    for group in groups:
        piece: list[Unit] = []
        size, spent = 0, 0.0
        for unit in group:
            if piece and (size + unit.tokens > tokens or spent + unit.cost > cost):
                pieces.append(piece)
                piece, size, spent = [], 0, 0.0
            piece.append(unit)
            size += unit.tokens
            spent += unit.cost
        pieces.append(piece)
    return pieces


def _micro_batch(row: list[Unit], streams: Sequence[str], slot: int = 0) -> MicroBatch:
    if not row:  # for a rank with less work than others, because collectives need all ranks
        row = [Unit([replace(NOTHING, adapter=slot)], [1], 0, 0, 0, 0, ONE)]
    samples = [sample for unit in row for sample in unit.samples]
    lengths = [len(sample.token_ids) for sample in samples]
    rollout_ids = [i for i, unit in enumerate(row) for _ in unit.samples]
    ends = np.cumsum(lengths)

    def shifted(name: str, last: float) -> np.ndarray:
        """[T] the next token's value in the same sample. `last` at each sample's last position, and in samples without the stream."""
        parts = [getattr(sample, name) for sample in samples]
        whole = np.concatenate([np.full(n, last, np.float32) if part is None else part for part, n in zip(parts, lengths, strict=True)])
        whole[:-1] = whole[1:]
        whole[ends - 1] = last
        return whole

    def of_rollouts(values: Iterable[int]) -> np.ndarray:
        return np.fromiter(values, np.int64)

    return MicroBatch(
        token_ids=np.concatenate([sample.token_ids for sample in samples]),
        labels=shifted("token_ids", 0),
        loss_mask=shifted("loss_mask", False),
        inference_logp=shifted("inference_logprobs", 0),
        advantages=shifted("advantages", 0),
        temperature=shifted("temperature", 1),
        versions=shifted("versions", -1),
        rollout_ids=np.repeat(np.array(rollout_ids, dtype=np.int64), lengths),
        rollout_lengths=of_rollouts(sum(int(np.count_nonzero(s.loss_mask)) for s in unit.samples) for unit in row),
        tokens_elsewhere=of_rollouts(unit.elsewhere for unit in row),
        group_lengths=of_rollouts(unit.group_length for unit in row),
        cu_seqlens=np.concatenate([[0], ends]).astype(np.int32),
        adapters=np.array([sample.adapter for sample in samples], dtype=np.int32),
        objectives=of_rollouts(unit.loss.number for unit in row),
        samples=tuple(samples) if row[0].tokens else (),
        **{LOSSES_NAME.get(name, name): shifted(name, STREAMS[name]) for name in streams},
    )
