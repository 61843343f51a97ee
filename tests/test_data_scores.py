"""What the trainer computed for the tokens of a batch reaches the tokens of a rollout, whichever rank and row trained them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from trainer_examples import make_samples, step_batch

from rlx.data.packing import pack
from rlx.data.scores import Scored, read_scores, write_scores
from rlx.paths import RunPaths
from rlx.rollout.record import record_batch
from rlx.runs.tokens import tokens_of
from rlx.types import MicroBatch, StepBatch

RANKS, TOKENS = 2, 60


def batch() -> StepBatch:
    samples = make_samples(groups=5, members=3)
    untrained = replace(samples[4], loss_mask=np.zeros_like(samples[4].loss_mask))
    return step_batch(3, [[*samples[:4], untrained, *samples[5:9]], samples[9:]])


def as_if_trained(row: MicroBatch) -> Scored:
    """A model that is 0.25 nat less certain than the engine, and whose entropy is a hundredth of the token's id."""
    mask = row.loss_mask
    return row, (row.inference_logp[mask] - 0.25).astype(np.float32), (row.labels[mask] / 100).astype(np.float32)


def write(paths: RunPaths, rank: int) -> None:
    whole = batch()
    rows = [row for part in pack(whole, rank=rank, ranks=RANKS, tokens=TOKENS).mini_batches for row in part.micro_batches]
    write_scores(paths, whole, [as_if_trained(row) for row in rows], rank)


def test_scores_of_all_ranks_find_their_tokens(tmp_path: Path):
    paths = RunPaths(tmp_path)
    record_batch(paths.recorded_of(3), batch())
    for rank in range(RANKS):
        write(paths, rank)
    samples = [sample for part in batch().mini_batches for sample in part]
    covered = np.concatenate([one.samples for one in read_scores(paths, 3)])
    assert sorted(covered) == [i for i, sample in enumerate(samples) if sample.loss_mask.any()]
    for sample in samples:
        for tokens in tokens_of(tmp_path, 3, sample.group, sample.member):
            if not tokens.sample.loss_mask.any():
                assert tokens.entropy is None
                continue
            assert tokens.entropy is not None
            assert tokens.mismatch is not None
            assert tokens.entropy[tokens.sample.loss_mask] == pytest.approx(
                tokens.sample.token_ids[tokens.sample.loss_mask] / 100, rel=1e-3
            )
            assert tokens.mismatch[tokens.sample.loss_mask] == pytest.approx(-0.25, rel=1e-3)
            assert np.isnan(tokens.entropy[~tokens.sample.loss_mask]).all()


def test_samples_of_a_rank_without_a_file_have_no_scores(tmp_path: Path):
    paths = RunPaths(tmp_path)
    record_batch(paths.recorded_of(3), batch())
    write(paths, 1)
    samples = [sample for part in batch().mini_batches for sample in part]
    (one,) = read_scores(paths, 3)
    there = {(samples[i].group, samples[i].member) for i in one.samples}
    assert {(s.group, s.member) for s in samples if tokens_of(tmp_path, 3, s.group, s.member)[0].entropy is not None} == there
    paths.scores_of(3, 1).write_bytes(b"cut")
    with pytest.raises(match="is damaged"):
        tokens_of(tmp_path, 3, samples[0].group, samples[0].member)
