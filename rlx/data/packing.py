"""From training samples to packed micro-batches, balanced over ranks. Labels are shifted here and nowhere else.

numpy only. Knows neither the model nor the objective; the result depends on its arguments alone, never on chance.

A *unit* is what may not be torn apart: all samples of one rollout, because sequence-level objectives need the whole rollout in one
micro-batch. Rollouts of one group are kept together where they fit, so that the trainer can compute their common prompt once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlx.types import MicroBatch, MiniBatch, StepBatch, TrainingSample

Unit = list[TrainingSample]  # the samples of one rollout


def pack(step: int, mini_batches: Sequence[Sequence[TrainingSample]], *, ranks: int, tokens: int) -> StepBatch:
    """Pack the samples of each mini-batch (one optimizer step) into rows of at most `tokens` tokens, equally many for every rank.

    A rollout of several samples that together exceed `tokens` gets a row of its own, longer than `tokens`.
    Samples without a trainable token are left out. Ranks that have less work get a dummy row that contributes exactly zero.

    Raises ValueError for a sample longer than `tokens`, or one whose first token is marked trainable (nothing predicts it).
    """
    assert ranks >= 1, ranks
    return StepBatch(step=step, mini_batches=tuple(_pack_mini_batch(samples, ranks, tokens) for samples in mini_batches))


def _pack_mini_batch(samples: Sequence[TrainingSample], ranks: int, tokens: int) -> MiniBatch:
    for sample in samples:
        _check(sample, tokens)
    groups = _groups([sample for sample in samples if sample.loss_mask.any()])
    units = [unit for group in groups for unit in group]
    rows = _fill(groups, ranks, tokens)
    per_rank: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    for start in range(0, len(rows), ranks):  # neighbours in size run at the same time; alternate who gets the largest
        turn = rows[start : start + ranks]
        for rank, row in enumerate(turn if (start // ranks) % 2 == 0 else reversed(turn)):
            per_rank[rank].append(_micro_batch(row))
    return MiniBatch(
        micro_batches=tuple(tuple(micro_batches) for micro_batches in per_rank),
        num_loss_tokens=sum(int(sample.loss_mask.sum()) for unit in units for sample in unit),
        num_sequences=len(units),
    )


def _check(sample: TrainingSample, tokens: int) -> None:
    where = f"sample of group {sample.group}, rollout {sample.rollout}, environment {sample.env}"
    if len(sample.token_ids) > tokens:
        raise ValueError(
            f"{where}: {len(sample.token_ids)} tokens do not fit a packed row of {tokens}; "
            "raise trainer.micro_batch_tokens (or seq_len), or lower sampling.max_tokens"
        )
    if len(sample.loss_mask) and sample.loss_mask[0]:
        raise ValueError(f"{where}: its first token is marked trainable, but no token before it predicts it; give the rollout a prompt")


def _groups(samples: Sequence[TrainingSample]) -> list[list[Unit]]:
    """Samples by group, then by rollout, in the order of first appearance."""
    order: dict[tuple[int, int], Unit] = {}
    for sample in samples:
        order.setdefault((sample.group, sample.rollout), []).append(sample)
    groups: dict[int, list[Unit]] = {}
    for (group, _), unit in order.items():
        groups.setdefault(group, []).append(unit)
    return list(groups.values())


def _size(unit: Unit) -> int:
    return sum(len(sample.token_ids) for sample in unit)


def _fill(groups: list[list[Unit]], ranks: int, tokens: int) -> list[list[Unit]]:
    """Distribute rollouts over rows; the number of rows is a positive multiple of `ranks`, and as small as this heuristic finds.

    Longest piece first, always into the row with the least in it. Pieces are whole groups, or runs of a group's rollouts where a group
    is larger than a row, or larger than a rank's fair share of the batch.
    """
    total = sum(_size(unit) for group in groups for unit in group)
    per_rank = max(1, -(-total // (ranks * tokens)))
    while True:
        num_rows = per_rank * ranks
        pieces = _pieces(groups, min(tokens, max(1, -(-total // num_rows))))
        order = sorted(range(len(pieces)), key=lambda i: (-sum(map(_size, pieces[i])), i))
        filled, members = [0] * num_rows, [[] for _ in range(num_rows)]  # type: tuple[list[int], list[list[int]]]
        for i in order:
            row = min(range(num_rows), key=lambda r: (filled[r], r))
            filled[row] += sum(map(_size, pieces[i]))
            members[row].append(i)
        overfull = any(size > tokens and sum(len(pieces[i]) for i in row) > 1 for size, row in zip(filled, members, strict=True))
        if not overfull:
            break
        per_rank += 1
    rows = [[unit for i in sorted(row) for unit in pieces[i]] for row in members]
    by_size = sorted(range(num_rows), key=lambda r: (-filled[r], r))
    used = max(1, -(-sum(map(bool, rows)) // ranks)) * ranks  # oversized rows leave others empty
    return [rows[r] for r in by_size[:used]]


def _pieces(groups: list[list[Unit]], limit: int) -> list[list[Unit]]:
    """Runs of rollouts of one group with at most `limit` tokens (a single rollout may exceed it)."""
    pieces: list[list[Unit]] = []
    for group in groups:
        piece: list[Unit] = []
        for unit in group:
            if piece and sum(map(_size, piece)) + _size(unit) > limit:
                pieces.append(piece)
                piece = []
            piece.append(unit)
        pieces.append(piece)
    return pieces


def _micro_batch(row: list[Unit]) -> MicroBatch:
    if not row:
        return _dummy()
    samples = [sample for unit in row for sample in unit]
    lengths = [len(sample.token_ids) for sample in samples]
    rollout_ids = [i for i, unit in enumerate(row) for _ in unit]
    return MicroBatch(
        token_ids=np.concatenate([s.token_ids for s in samples]).astype(np.int32),
        labels=_shifted([s.token_ids for s in samples], 0, np.int32),
        position_ids=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        loss_mask=_shifted([s.loss_mask for s in samples], False, np.bool_),
        inference_logprobs=_shifted([s.inference_logprobs for s in samples], 0.0, np.float32),
        advantages=_shifted([s.advantages for s in samples], 0.0, np.float32),
        temperature=np.repeat(np.array([s.temperature for s in samples], dtype=np.float32), lengths),
        versions=_shifted([s.versions for s in samples], -1, np.int32),
        rollout_ids=np.repeat(np.array(rollout_ids, dtype=np.int32), lengths),
        rollout_lengths=np.array([sum(int(s.loss_mask.sum()) for s in unit) for unit in row], dtype=np.int32),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
    )


def _shifted(arrays: Sequence[np.ndarray], last: float, dtype: type) -> np.ndarray:
    """[T] What belongs to the next token of the same sample; `last` at each sample's last position."""
    return np.concatenate([part for array in arrays for part in (array[1:], [last])]).astype(dtype)


def _dummy() -> MicroBatch:
    """One token, nothing to train: for a rank that has less to do than others, because collectives need all ranks."""
    one_int, one_float = np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.float32)
    return MicroBatch(
        token_ids=one_int,
        labels=one_int,
        position_ids=one_int,
        loss_mask=np.zeros(1, dtype=np.bool_),
        inference_logprobs=one_float,
        advantages=one_float,
        temperature=np.ones(1, dtype=np.float32),
        versions=np.full(1, -1, dtype=np.int32),
        rollout_ids=one_int,
        rollout_lengths=one_int,
        cu_seqlens=np.array([0, 1], dtype=np.int32),
    )
