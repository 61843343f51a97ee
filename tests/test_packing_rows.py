"""Packing: labels, boundaries, whole rollouts, balance, determinism."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from trainer_examples import make_sample, make_samples

from rlx.data.packing import pack
from rlx.types import MicroBatch, MiniBatch, TrainingSample


def rows_of(mini_batch: MiniBatch) -> list[MicroBatch]:
    return [row for rank in mini_batch.micro_batches for row in rank]


def tokens_of(samples: list[TrainingSample]) -> list[tuple]:
    """Every trainable token with what belongs to it, in a form that can be compared."""
    return sorted(
        (tuple(s.token_ids[:t].tolist()), int(s.token_ids[t]), float(s.inference_logprobs[t]), float(s.advantages[t]), int(s.versions[t]),
         np.float32(s.temperature))
        for s in samples for t in np.flatnonzero(s.loss_mask)
    )  # fmt: skip


def packed_tokens(mini_batch: MiniBatch) -> list[tuple]:
    found = []
    for row in rows_of(mini_batch):
        starts = np.repeat(row.cu_seqlens[:-1], np.diff(row.cu_seqlens))
        for t in np.flatnonzero(row.loss_mask):
            prefix = tuple(row.token_ids[starts[t] : t + 1].tolist())
            found.append((prefix, int(row.labels[t]), float(row.inference_logprobs[t]), float(row.advantages[t]), int(row.versions[t]),
                          row.temperature[t]))  # fmt: skip
    return sorted(found)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("tokens", [25, 60, 1000])
def test_every_trainable_token_appears_once_with_its_own_values(ranks, tokens):
    samples = make_samples()
    (mini_batch,) = pack(3, [samples], ranks=ranks, tokens=tokens).mini_batches
    assert packed_tokens(mini_batch) == tokens_of(samples)
    assert mini_batch.num_loss_tokens == sum(int(s.loss_mask.sum()) for s in samples)
    assert mini_batch.num_sequences == len({(s.group, s.rollout) for s in samples})


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("tokens", [30, 60, 1000])
def test_rollouts_stay_whole_and_rows_short_and_ranks_equally_busy(ranks, tokens):
    samples = make_samples(groups=7)
    (mini_batch,) = pack(0, [samples], ranks=ranks, tokens=tokens).mini_batches
    assert len({len(rank) for rank in mini_batch.micro_batches}) == 1
    assert len(mini_batch.micro_batches) == ranks
    lengths = sorted(
        sum(int(s.loss_mask.sum()) for s in samples if (s.group, s.rollout) == key) for key in {(s.group, s.rollout) for s in samples}
    )
    assert sorted(int(n) for row in rows_of(mini_batch) for n in row.rollout_lengths if n) == lengths
    for row in rows_of(mini_batch):
        size = len(row.token_ids)
        assert size <= tokens
        assert row.cu_seqlens[0] == 0
        assert row.cu_seqlens[-1] == size
        assert (np.diff(row.rollout_ids) >= 0).all()
        assert np.bincount(row.rollout_ids[row.loss_mask], minlength=len(row.rollout_lengths)).tolist() == row.rollout_lengths.tolist()
        for start, end in zip(row.cu_seqlens[:-1], row.cu_seqlens[1:], strict=True):
            assert row.position_ids[start:end].tolist() == list(range(end - start))
            assert row.labels[start : end - 1].tolist() == row.token_ids[start + 1 : end].tolist()
            assert not row.loss_mask[end - 1]
            assert row.versions[end - 1] == -1


def test_rows_are_balanced_over_ranks():
    samples = make_samples(groups=40, rollouts=4)
    (mini_batch,) = pack(0, [samples], ranks=4, tokens=200).mini_batches
    sizes = [sum(len(row.token_ids) for row in rank) for rank in mini_batch.micro_batches]
    assert max(sizes) <= 1.1 * min(sizes)
    total = sum(sizes)
    assert len(mini_batch.micro_batches[0]) <= -(-total // (4 * 200)) + 1, "no more rows than needed, nearly"


def test_rollouts_of_one_prompt_lie_side_by_side():
    samples = make_samples(groups=6)
    shuffled = [samples[i] for i in np.random.default_rng(0).permutation(len(samples))]
    (mini_batch,) = pack(0, [shuffled], ranks=1, tokens=10_000).mini_batches
    (row,) = rows_of(mini_batch)
    prompts = [
        tuple(row.token_ids[start : start + 4].tolist())
        for start, n in zip(row.cu_seqlens[:-1], np.diff(row.cu_seqlens), strict=True)
        if n > 6
    ]
    changes = sum(a != b for a, b in pairwise(prompts))
    assert changes == len(set(prompts)) - 1


def test_packing_is_deterministic():
    one, two = (pack(0, [make_samples()], ranks=2, tokens=60) for _ in range(2))
    for a, b in zip(rows_of(one.mini_batches[0]), rows_of(two.mini_batches[0]), strict=True):
        for field in MicroBatch.__slots__:
            assert np.array_equal(getattr(a, field), getattr(b, field)), field


def test_dtypes_are_those_of_the_record():
    (mini_batch,) = pack(0, [make_samples()], ranks=3, tokens=1000).mini_batches
    for row in rows_of(mini_batch):
        for field, kind in MicroBatch.__annotations__.items():
            assert getattr(row, field).dtype == {"Int": np.int32, "Float": np.float32, "Bool": np.bool_}[kind], field


def test_ranks_without_work_get_a_row_that_contributes_nothing():
    rng = np.random.default_rng(0)
    (mini_batch,) = pack(0, [[make_sample(0, 0, [3, 4, 5], [2], rng)]], ranks=3, tokens=10).mini_batches
    rows = rows_of(mini_batch)
    assert [int(row.loss_mask.sum()) for row in rows] == [1, 0, 0]
    assert [row.rollout_lengths.tolist() for row in rows] == [[1], [0], [0]]
    assert mini_batch.num_sequences == 1


def test_samples_without_trainable_tokens_are_left_out():
    rng = np.random.default_rng(0)
    samples = [make_sample(0, 0, [3, 4, 5], [2], rng), make_sample(0, 1, [3, 4, 5, 6], [], rng)]
    (mini_batch,) = pack(0, [samples], ranks=1, tokens=10).mini_batches
    assert (mini_batch.num_sequences, mini_batch.num_loss_tokens) == (1, 1)
    assert len(rows_of(mini_batch)[0].token_ids) == 3


def test_mini_batches_keep_their_own_samples():
    samples = make_samples()
    batch = pack(5, [samples[:6], samples[6:], []], ranks=2, tokens=60)
    assert batch.step == 5
    assert [packed_tokens(mini_batch) for mini_batch in batch.mini_batches] == [tokens_of(samples[:6]), tokens_of(samples[6:]), []]
    assert [mini_batch.num_loss_tokens for mini_batch in batch.mini_batches][2] == 0


def test_a_rollout_of_several_samples_may_exceed_a_row_but_a_sample_may_not():
    rng = np.random.default_rng(0)
    long = [make_sample(0, 0, range(3, 11), [4], rng), make_sample(0, 0, range(3, 11), [5], rng), make_sample(1, 0, [3, 4], [1], rng)]
    (mini_batch,) = pack(0, [long], ranks=1, tokens=8).mini_batches
    assert sorted(len(row.token_ids) for row in rows_of(mini_batch)) == [2, 16]
    with pytest.raises(
        ValueError, match=r"group 0, rollout 0, environment test: 8 tokens do not fit a packed row of 7; raise trainer\.micro_batch"
    ):
        pack(0, [long], ranks=1, tokens=7)


def test_a_trainable_first_token_is_refused():
    with pytest.raises(ValueError, match="first token is marked trainable"):
        pack(0, [[make_sample(0, 0, [3, 4], [0, 1], np.random.default_rng(0))]], ranks=1, tokens=8)
