"""A rollout of many samples that exceeds a row: split where the objective looks at single tokens, and the loss stays what it was."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from test_losses_mix import numbers, tokens_of, with_own_ids
from trainer_examples import step_batch

from rlx.config.schema import LossTerms
from rlx.data.packing import pack
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
from rlx.types import MiniBatch, TrainingSample

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
