"""Samples become rows: whole rollouts, balanced over ranks, shifted labels; a rollout may also be divided."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from test_losses_mix import numbers, tokens_of, with_own_ids
from traces import trace_of
from trainer_examples import make_sample, make_samples, step_batch

from rlx.config.schema import LossTerms
from rlx.data.packing import LOSSES_NAME, pack
from rlx.losses.base import AGGREGATES, Objective
from rlx.losses.cispo import cispo
from rlx.losses.diagnostics import check_counts
from rlx.losses.dppo import dppo
from rlx.losses.grpo import grpo
from rlx.losses.gspo import gspo
from rlx.losses.mix import LossMix
from rlx.losses.opo import opo
from rlx.losses.reinforce import reinforce
from rlx.losses.rloo import rloo
from rlx.losses.sapo import sapo
from rlx.rollout.samples import samples_of
from rlx.trace import Turn
from rlx.types import STREAMS, Group, MicroBatch, MiniBatch, RankBatch, Rollout, Task, TrainingSample


@dataclass
class Everybody:
    """One mini-batch as packed by all ranks, each for itself."""

    ranks: list[MiniBatch]

    @property
    def rows(self) -> list[MicroBatch]:
        return [row for mini_batch in self.ranks for row in mini_batch.micro_batches]

    @property
    def counts(self) -> tuple[int, int]:
        """(num_sequences, num_loss_tokens), the same on all ranks."""
        (counts,) = {(mini_batch.num_sequences, mini_batch.num_loss_tokens) for mini_batch in self.ranks}
        return counts


def pack_all(mini_batches: Sequence[Sequence[TrainingSample]], *, ranks: int, tokens: int) -> list[Everybody]:
    batches = [pack(step_batch(3, mini_batches), rank=rank, ranks=ranks, tokens=tokens) for rank in range(ranks)]
    assert {batch.step for batch in batches} == {3}
    return [Everybody(list(mini)) for mini in zip(*(batch.mini_batches for batch in batches), strict=True)]


def trained_tokens(samples: list[TrainingSample]) -> list[tuple]:
    """Every trainable token with its values, in a comparable form."""
    return sorted(
        (tuple(s.token_ids[:t].tolist()), int(s.token_ids[t]), float(s.inference_logprobs[t]), float(s.advantages[t]), int(s.versions[t]),
         s.temperature[t])
        for s in samples for t in np.flatnonzero(s.loss_mask)
    )  # fmt: skip


def packed_tokens(mini_batch: Everybody) -> list[tuple]:
    found = []
    for row in mini_batch.rows:
        starts = np.repeat(row.cu_seqlens[:-1], np.diff(row.cu_seqlens))
        for t in np.flatnonzero(row.loss_mask):
            prefix = tuple(row.token_ids[starts[t] : t + 1].tolist())
            found.append((prefix, int(row.labels[t]), float(row.inference_logp[t]), float(row.advantages[t]), int(row.versions[t]),
                          row.temperature[t]))  # fmt: skip
    return sorted(found)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("tokens", [25, 60, 1000])
def test_every_trainable_token_appears_once_with_its_own_values(ranks, tokens):
    samples = make_samples()
    (mini_batch,) = pack_all([samples], ranks=ranks, tokens=tokens)
    assert packed_tokens(mini_batch) == trained_tokens(samples)
    assert mini_batch.counts == (len({(s.group, s.member) for s in samples}), sum(int(s.loss_mask.sum()) for s in samples))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("tokens", [30, 60, 1000])
def test_rollouts_stay_whole_and_rows_short_and_ranks_equally_busy(ranks, tokens):
    samples = make_samples(groups=7)
    (mini_batch,) = pack_all([samples], ranks=ranks, tokens=tokens)
    assert len({len(rank.micro_batches) for rank in mini_batch.ranks}) == 1
    lengths = sorted(
        sum(int(s.loss_mask.sum()) for s in samples if (s.group, s.member) == key) for key in {(s.group, s.member) for s in samples}
    )
    assert sorted(int(n) for row in mini_batch.rows for n in row.rollout_lengths if n) == lengths
    groups = [sum(int(s.loss_mask.sum()) for s in samples if s.group == group) for group in {s.group for s in samples}]
    assert {rank.num_groups for rank in mini_batch.ranks} == {len(groups)}
    weights = sum(own / whole for row in mini_batch.rows for own, whole in zip(row.rollout_lengths, row.group_lengths, strict=True) if own)
    assert weights == pytest.approx(len(groups)), "over all rows and ranks, each group's rollouts must add up to the whole group"
    for row in mini_batch.rows:
        size = len(row.token_ids)
        assert size <= tokens
        assert row.cu_seqlens[0] == 0
        assert row.cu_seqlens[-1] == size
        assert (np.diff(row.rollout_ids) >= 0).all()
        assert np.bincount(row.rollout_ids[row.loss_mask], minlength=len(row.rollout_lengths)).tolist() == row.rollout_lengths.tolist()
        for start, end in zip(row.cu_seqlens[:-1], row.cu_seqlens[1:], strict=True):
            assert row.labels[start : end - 1].tolist() == row.token_ids[start + 1 : end].tolist()
            assert not row.loss_mask[end - 1]
            assert row.versions[end - 1] == -1


def test_rows_are_balanced_over_ranks():
    samples = make_samples(groups=40, members=4)
    (mini_batch,) = pack_all([samples], ranks=4, tokens=200)
    sizes = [sum(len(row.token_ids) for row in rank.micro_batches) for rank in mini_batch.ranks]
    assert max(sizes) <= 1.1 * min(sizes)
    total = sum(sizes)
    assert len(mini_batch.ranks[0].micro_batches) <= -(-total // (4 * 200)) + 1, "at most one row more than needed"


def work(lengths: Sequence[int]) -> float:
    """Of a model whose attention costs as much as its matrices in a sample of 100 tokens."""
    return sum(n + n * n / 100 for n in lengths)


def imbalance_of(packed: Sequence[RankBatch], cost: Callable[[Sequence[int]], float]) -> float:
    """From the rows that all ranks made: how much longer they take together than with equal rows. Of a dummy nothing counts."""
    costs = [
        [
            cost(np.diff(row.cu_seqlens).tolist()) if row.loss_mask.any() else 0
            for mini_batch in own.mini_batches
            for row in mini_batch.micro_batches
        ]
        for own in packed
    ]
    turns = np.array(costs).T  # [turns, ranks]
    return float(turns.max(1).sum() / turns.mean(1).sum())


def of_skewed_lengths(seed: int = 0) -> list[TrainingSample]:
    """Rollouts of about 60 tokens, a few of 600, as reasoning makes them."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(np.log(60), 1.0, (64, 8)).clip(4, 600).astype(int)
    return [
        make_sample(group, member, rng.integers(3, 40, n).tolist(), range(3, n), rng)
        for group, members in enumerate(lengths)
        for member, n in enumerate(members)
    ]


@pytest.mark.parametrize(("ranks", "goal"), [(2, 1.02), (8, 1.08)])
def test_samples_of_unequal_length_are_balanced_by_their_work(ranks, goal):
    samples = of_skewed_lengths()
    by_tokens, by_work = (
        [pack(step_batch(0, [samples]), rank=rank, ranks=ranks, tokens=800, cost=cost) for rank in range(ranks)] for cost in (sum, work)
    )
    assert imbalance_of(by_tokens, work) > 1 + 5 * (goal - 1)
    assert by_work[0].imbalance == pytest.approx(imbalance_of(by_work, work))
    assert by_work[0].imbalance < goal
    rows = [[row for own in packed for row in own.mini_batches[0].micro_batches] for packed in (by_tokens, by_work)]
    assert len(rows[1]) <= len(rows[0]) + ranks
    assert max(len(row.token_ids) for row in rows[1]) <= 800
    assert packed_tokens(Everybody([own.mini_batches[0] for own in by_work])) == trained_tokens(samples)
    assert all(own.mini_batches[0].counts == by_tokens[0].mini_batches[0].counts for own in by_work)


def test_rollouts_of_one_prompt_lie_side_by_side():
    samples = make_samples(groups=6)
    shuffled = [samples[i] for i in np.random.default_rng(0).permutation(len(samples))]
    (mini_batch,) = pack_all([shuffled], ranks=1, tokens=10_000)
    (row,) = mini_batch.rows
    prompts = [
        tuple(row.token_ids[start : start + 4].tolist())
        for start, n in zip(row.cu_seqlens[:-1], np.diff(row.cu_seqlens), strict=True)
        if n > 6
    ]
    changes = sum(a != b for a, b in pairwise(prompts))
    assert changes == len(set(prompts)) - 1


def with_streams(samples: Sequence[TrainingSample], streams: Iterable[str]) -> list[TrainingSample]:
    """The samples with streams on every other one. The values derive from its token ids; a first token is not predicted, so it has 0."""

    def values(sample: TrainingSample, k: int) -> Any:
        return np.where(np.arange(len(sample.token_ids)) > 0, sample.token_ids + k / 8, 0).astype(np.float32)

    return [replace(s, **{name: values(s, k) for k, name in enumerate(streams)}) if i % 2 else s for i, s in enumerate(samples)]


@pytest.mark.parametrize("ranks", [1, 3])
def test_streams_are_shifted_with_their_labels_and_filled_where_a_sample_has_none(ranks):
    samples = with_streams(make_samples(), ["ce_weights", "teacher_logprobs"])
    (mini_batch,) = pack_all([samples], ranks=ranks, tokens=60)
    seen = set()
    for row in mini_batch.rows:
        assert row.policy_weights is None
        for start, end in pairwise(row.cu_seqlens):
            if end - start == 1:
                continue  # the dummy row of a rank without work
            (own,) = {i for i, s in enumerate(samples) if np.array_equal(s.token_ids, row.token_ids[start:end])}
            seen.add(own)
            for k, name in enumerate(("ce_weights", "teacher_logprobs")):
                wanted = row.labels[start : end - 1] + k / 8 if own % 2 else np.full(end - start - 1, STREAMS[name])
                stream = getattr(row, LOSSES_NAME.get(name, name))
                assert np.array_equal(stream[start : end - 1], wanted, equal_nan=True)
                assert np.array_equal(stream[end - 1], STREAMS[name], equal_nan=True)
    assert len(seen) == len(samples)


def test_a_mini_batch_has_the_same_streams_on_every_rank():
    """If a rank has only samples without the stream, it must refuse the batch too; otherwise the other ranks wait for it."""
    samples = [replace(s, ce_weights=(np.arange(len(s.token_ids)) > 0).astype(np.float32)) if s.group == 0 else s for s in make_samples()]
    (mini_batch,) = pack_all([samples], ranks=8, tokens=60)
    assert all(row.ce_weights is not None for row in mini_batch.rows)


def test_the_case_that_the_records_docstring_works_out():
    turns = (
        Turn(
            prompt_ids=ids(11, 12, 13),
            completion_ids=ids(21, 22),
            logprobs=floats(-1, -2),
            versions=ids(4, 4),
            temperature=1.0,
            finish_reason="stop",
        ),
        Turn(
            prompt_ids=ids(11, 12, 13, 21, 22, 31, 32),
            completion_ids=ids(41),
            logprobs=floats(-3),
            versions=ids(5),
            temperature=0.5,
            finish_reason="stop",
        ),
    )
    other = (
        Turn(prompt_ids=ids(51, 52), completion_ids=ids(61), logprobs=floats(-1), versions=ids(4), temperature=1.0, finish_reason="stop"),
    )
    task = Task(env="e", example_id=0, index=0, row={})
    rollouts = tuple(
        Rollout(task=task, member=i, trace=trace_of(*t), prompt="", completion="", reward=0.0, rewards={}, metrics={}, status="ok", stop="")
        for i, t in enumerate((turns, other))
    )
    group = Group(id=0, task=task, rollouts=rollouts, advantages=floats(0.5, -0.5))
    samples = samples_of(group, strategy="interleaved")
    assert samples[0].token_ids.tolist() == [11, 12, 13, 21, 22, 31, 32, 41]
    assert samples[0].loss_mask.tolist() == [False, False, False, True, True, False, False, True]
    assert samples[0].versions.tolist() == [-1, -1, -1, 4, 4, -1, -1, 5]
    (row,) = pack(step_batch(0, [samples]), rank=0, ranks=1, tokens=100).mini_batches[0].micro_batches
    assert row.token_ids.tolist() == [11, 12, 13, 21, 22, 31, 32, 41, 51, 52, 61]
    assert row.labels.tolist() == [12, 13, 21, 22, 31, 32, 41, 0, 52, 61, 0]
    assert np.flatnonzero(row.loss_mask).tolist() == [2, 3, 6, 9]
    assert row.versions.tolist() == [-1, -1, 4, 4, -1, -1, 5, -1, -1, 4, -1]
    assert row.temperature.tolist() == [1, 1, 1, 1, 1, 1, 0.5, 1, 1, 1, 1]
    assert row.rollout_ids.tolist() == [0] * 8 + [1] * 3
    assert row.rollout_lengths.tolist() == [3, 1]
    assert row.cu_seqlens.tolist() == [0, 8, 11]


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_ranks_without_work_get_a_row_that_contributes_nothing():
    rng = np.random.default_rng(0)
    (mini_batch,) = pack_all([[make_sample(0, 0, [3, 4, 5], [2], rng)]], ranks=3, tokens=10)
    rows = mini_batch.rows
    assert [int(row.loss_mask.sum()) for row in rows] == [1, 0, 0]
    assert [row.rollout_lengths.tolist() for row in rows] == [[1], [0], [0]]
    assert mini_batch.counts == (1, 1)


def test_samples_without_trainable_tokens_are_left_out():
    rng = np.random.default_rng(0)
    samples = [make_sample(0, 0, [3, 4, 5], [2], rng), make_sample(0, 1, [3, 4, 5, 6], [], rng)]
    (mini_batch,) = pack_all([samples], ranks=1, tokens=10)
    assert mini_batch.counts == (1, 1)
    assert len(mini_batch.rows[0].token_ids) == 3


def test_mini_batches_keep_their_own_samples():
    samples = make_samples()
    parts = [samples[:6], samples[6:], []]
    batch = pack_all(parts, ranks=2, tokens=60)
    assert [packed_tokens(mini_batch) for mini_batch in batch] == [trained_tokens(part) for part in parts]
    assert batch[2].counts == (0, 0)
    one = pack(step_batch(5, parts), rank=1, ranks=2, tokens=60)
    assert (one.step, one.num_tokens) == (5, sum(len(s.token_ids) for s in samples))


def test_a_rollout_of_several_samples_may_exceed_a_row_but_a_sample_may_not():
    rng = np.random.default_rng(0)
    long = [make_sample(0, 0, range(3, 11), [4], rng), make_sample(0, 0, range(3, 11), [5], rng), make_sample(1, 0, [3, 4], [1], rng)]
    (mini_batch,) = pack_all([long], ranks=1, tokens=8)
    assert sorted(len(row.token_ids) for row in mini_batch.rows) == [2, 16]
    with pytest.raises(
        ValueError, match=r"group 0, rollout 0, environment test: 8 tokens do not fit a packed row of 7; raise trainer\.micro_batch"
    ):
        pack(step_batch(0, [long]), rank=0, ranks=1, tokens=7)


def test_a_trainable_first_token_is_refused():
    with pytest.raises(ValueError, match="first token is marked trainable"):
        pack(step_batch(0, [[make_sample(0, 0, [3, 4], [0, 1], np.random.default_rng(0))]]), rank=0, ranks=1, tokens=8)


ROW = 40


def branches() -> list[TrainingSample]:
    """Two groups. Rollout 0 of the first has seven samples of 15 to 25 tokens; the others have one or two."""
    rng, samples = np.random.default_rng(3), []
    for group, member, count in ((0, 0, 7), (0, 1, 1), (1, 0, 2), (1, 1, 1)):
        for _ in range(count):
            length = int(rng.integers(15, 25))
            mask = np.arange(length) >= rng.integers(5, 12)
            samples.append(
                TrainingSample(
                    group=group,
                    member=member,
                    env="e",
                    token_ids=np.zeros(length, np.int32),
                    loss_mask=mask,
                    inference_logprobs=np.where(mask, -rng.random(length), 0).astype(np.float32),
                    advantages=np.where(mask, 0.7 - member, 0).astype(np.float32),
                    temperature=np.ones(length, np.float32),
                    versions=np.where(mask, 0, -1).astype(np.int32),
                )
            )
    return with_own_ids(samples)


def mix_of(function: object, **terms: object) -> LossMix:
    return LossMix([Objective(function, LossTerms(**{"aggregate": "token_mean", **terms}), max_length=64)], {"e": 0})  # type: ignore[arg-type]


def packed(mix: LossMix, samples: list[TrainingSample], tokens: int, ranks: int = 1) -> list[MiniBatch]:
    return [
        pack(step_batch(0, [samples]), rank=rank, ranks=ranks, tokens=tokens, loss_of=mix.loss_of).mini_batches[0] for rank in range(ranks)
    ]


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("function", [grpo, cispo, dppo, opo, reinforce, sapo])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_sum_over_the_rows_is_the_loss_of_the_whole_rollout(function: object, aggregate: str, ranks: int):
    mix, samples = mix_of(partial(function), aggregate=aggregate, correction="tis"), branches()  # type: ignore[call-overload]
    table = numbers(samples)
    found = []
    for tokens, over in ((10_000, 1), (ROW, ranks)):
        parts = packed(mix, samples, tokens, over)
        rows = [row for part in parts for row in part.micro_batches]
        assert max(len(row.token_ids) for row in rows) <= tokens
        results = [mix(tokens_of(row, table), part.counts) for part in parts for row in part.micro_batches]
        total = torch.stack([loss for loss, _ in results]).sum()
        sums = {name: float(sum(stats.sums[name] for _, stats in results)) for name in ("tokens", "sequences", "groups")}
        check_counts(sums, parts[0].num_loss_tokens, parts[0].num_sequences, parts[0].num_groups)
        found.append((total, torch.autograd.grad(total, table["logp"])[0]))
    (whole, gradient), (split, of_parts) = found
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(of_parts, gradient, rtol=1e-12, atol=1e-14)
    assert float(gradient.norm()) > 0


@pytest.mark.parametrize(
    ("function", "terms"), [(gspo, {}), (rloo, {}), (grpo, {"correction": "seq_mis"}), (partial(lambda tokens: grpo(tokens)), {})]
)
def test_a_rollout_stays_whole_where_its_tokens_share_a_weight_or_the_objective_does_not_say(function: object, terms: dict):
    (part,) = packed(mix_of(function, **terms), branches(), ROW)
    assert max(len(row.token_ids) for row in part.micro_batches) > ROW
    assert not any(row.tokens_elsewhere.any() for row in part.micro_batches)
