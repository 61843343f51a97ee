"""Packing for models that compute the samples of a row beside each other, padded to the longest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from test_train_models import ARCHITECTURES
from trainer_examples import VOCABULARY, gradients, make_model, make_sample, make_trainer, step_batch

from rlx.data.packing import pack
from rlx.models.layout import build_layout
from rlx.types import MicroBatch, RankBatch, TrainingSample

pytestmark = pytest.mark.slow


def of_lengths(lengths: Sequence[int], members: int = 4, seed: int = 0) -> list[TrainingSample]:
    rng = np.random.default_rng(seed)
    return [
        make_sample(i // members, i % members, rng.integers(3, VOCABULARY, n).tolist(), range(2, n), rng) for i, n in enumerate(lengths)
    ]


def skewed(count: int = 256, longest: int = 400) -> list[TrainingSample]:
    """Samples of about 20 tokens, a few of hundreds, in a random order."""
    rng = np.random.default_rng(1)
    return of_lengths(rng.lognormal(np.log(20), 1.0, count).clip(4, longest).astype(int).tolist())


def work(lengths: Sequence[int]) -> float:
    return sum(n + n * n / 100 for n in lengths)


def computed(row: MicroBatch) -> int:
    """Tokens that the model computes for a row, padding included, of its whole samples."""
    lengths = np.diff(row.cu_seqlens)
    return int(len(lengths) * lengths.max())


def packed(samples: Sequence[TrainingSample], ranks: int, tokens: int, **keys: Any) -> list[RankBatch]:
    return [pack(step_batch(0, [samples]), rank=rank, ranks=ranks, tokens=tokens, **keys) for rank in range(ranks)]


def rows_of(batches: Sequence[RankBatch]) -> list[MicroBatch]:
    return [row for batch in batches for mini_batch in batch.mini_batches for row in mini_batch.micro_batches]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("cost", [sum, work])
def test_rows_hold_their_limit_with_the_padding(ranks: int, cost: Callable[[Sequence[int]], float]) -> None:
    samples, tokens = skewed(), 512
    before, after = packed(samples, ranks, tokens, cost=cost), packed(samples, ranks, tokens, cost=cost, padded=True)
    assert max(map(computed, rows_of(before))) > 4 * tokens, "this is what padding does to rows that are filled by tokens"
    assert max(map(computed, rows_of(after))) <= tokens
    assert sorted(int(n) for row in rows_of(after) for n in np.diff(row.cu_seqlens) if n > 1) == sorted(len(s.token_ids) for s in samples)
    assert len({len(batch.mini_batches[0].micro_batches) for batch in after}) == 1
    assert after[0].mini_batches[0].counts == before[0].mini_batches[0].counts
    total, longest = sum(len(s.token_ids) for s in samples), max(len(s.token_ids) for s in samples)
    assert sum(map(computed, rows_of(after))) < total + tokens * np.log(longest / 4)
    for one, again in zip(rows_of(after), rows_of(packed(samples, ranks, tokens, cost=cost, padded=True)), strict=True):
        assert np.array_equal(one.token_ids, again.token_ids)


def test_a_rollout_of_several_samples_stays_whole_and_counts_with_its_longest() -> None:
    rng = np.random.default_rng(0)
    samples = [make_sample(0, 0, range(3, 3 + n), [1], rng) for n in (10, 4, 4)] + of_lengths([9, 9, 4, 4])[1:]
    batch = packed(samples, 1, 30, padded=True)
    assert sorted(np.diff(row.cu_seqlens).tolist() for row in rows_of(batch)) == [[9, 4, 4], [10, 4, 4]]
    alone = packed(samples[:3], 1, 20, padded=True)
    assert [computed(row) for row in rows_of(alone)] == [30], "a rollout that exceeds the limit has a row of its own"


def test_an_empty_batch_and_few_samples_for_many_ranks_give_dummies() -> None:
    for samples in ([], of_lengths([5])):
        rows = rows_of(packed(samples, 3, 30, padded=True))
        assert sorted(len(row.token_ids) for row in rows) == [1] * (3 - len(samples)) + [5] * len(samples)


def test_gradients_do_not_depend_on_how_padded_rows_are_packed() -> None:
    config_class, keys = ARCHITECTURES["qwen3_next_recurrent"]
    samples, found = of_lengths([40, 5, 6, 7, 30, 5, 6, 7]), []
    for padded in (False, True):
        trainer = make_trainer(make_model(config_class, **keys))
        assert trainer.padded
        batch = pack(step_batch(0, [samples]), rank=0, ranks=1, tokens=82, padded=padded)
        computed = [
            build_layout(row.token_ids, row.cu_seqlens, row.scored, "rows", "cpu").num_tokens for row in batch.mini_batches[0].micro_batches
        ]
        assert (max(computed) > 82) != padded
        trainer.accumulate_gradients(batch.mini_batches[0])
        found.append(gradients(trainer))
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=1e-4, atol=1e-6, msg=name)
