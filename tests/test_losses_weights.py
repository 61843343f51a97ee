"""Weights of the losses as a user writes them: from overrides to the values and gradients of a batch, against plain loops in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import naive_objectives as naive
import numpy as np
import pytest
import torch
from mixed_examples import Spec, naive_total, terms
from test_losses_mix import numbers, tokens_of
from test_rollout_samples import rollout, turn

from rlx.config.load import compose
from rlx.data.packing import pack
from rlx.losses.aipo import opd
from rlx.losses.grpo import grpo
from rlx.policy.observation_mask import ROLES
from rlx.rollout.batch import make_batch
from rlx.train.build import losses_of
from rlx.types import Group, Task, TrainingSample

ENVS = ("sums", "reverse_text", "word_guess")
REFERENCE, USERS = ("ref.name=other/model", "loss.kl.beta=0.2"), ("loss.ce_coef=0.5", "envs.sums.learn.user=0.7")
POLICY = ("envs.sums.loss_weights.policy=0.5", "envs.word_guess.loss_weights.policy=2")
KL = ("envs.sums.loss_weights.ref_kl=2", "envs.word_guess.loss_weights.ref_kl=0.25")

OWN = (
    *("envs.word_guess.loss.kl.beta=0.3", "envs.word_guess.loss.ce_coef=0.1", "envs.word_guess.learn.user=2"),
    *("envs.reverse_text.loss=opd", "envs.reverse_text.loss_weights.ref_kl=3"),
)


def spec(**keys: Any) -> Spec:
    return Spec(grpo, naive.grpo, "policy", terms("seq_mean", **keys))


# By case: overrides, then of each environment its objective and its weights: policy, ref_kl, and of user turns.
CASES: dict[str, tuple[tuple[str, ...], dict[str, tuple[Spec, float, float, float]]]] = {
    "the policy's alone": (POLICY, {"sums": (spec(), 0.5, 1, 0), "reverse_text": (spec(), 1, 1, 0), "word_guess": (spec(), 2, 1, 0)}),
    "the reference's": (
        (*REFERENCE, *KL),
        {"sums": (spec(beta=0.2), 1, 2, 0), "reverse_text": (spec(beta=0.2), 1, 1, 0), "word_guess": (spec(beta=0.2), 1, 0.25, 0)},
    ),
    "cross-entropy": (
        (*USERS, "envs.word_guess.learn.user=2"),
        {"sums": (spec(ce_coef=0.5), 1, 1, 0.7), "reverse_text": (spec(ce_coef=0.5), 1, 1, 0), "word_guess": (spec(ce_coef=0.5), 1, 1, 2)},
    ),
    "all, and other ones for an environment": (
        (*REFERENCE, *USERS, *POLICY, *KL, *OWN),
        {
            "sums": (spec(beta=0.2, ce_coef=0.5), 0.5, 2, 0.7),
            "reverse_text": (Spec(opd, naive.opd, "ref_kl", terms()), 1, 3, 0),
            "word_guess": (spec(beta=0.3, ce_coef=0.1), 2, 0.25, 2),
        },
    ),
    "the KL term alone where the policy's weight is 0": (
        (*REFERENCE, "envs.sums.loss_weights.policy=0"),
        {"sums": (spec(beta=0.2), 0, 1, 0), "reverse_text": (spec(beta=0.2), 1, 1, 0), "word_guess": (spec(beta=0.2), 1, 1, 0)},
    ),
}


def played() -> tuple[list[Group], list[TrainingSample], list[np.ndarray]]:
    """Groups of two turns a rollout, with token ids that occur once; their samples by hand, without weights; where users speak."""
    rng, groups, samples, users, start = np.random.default_rng(2), [], [], [], 0
    for number in range(6):
        task = Task(env=ENVS[number % 3], example_id=0, index=number, row={})
        advantages, rollouts = rng.normal(size=3).astype(np.float32), []
        for member in range(3):
            first, said, answered, then = (int(n) for n in rng.integers(2, 7, 4))
            length = first + said + answered + then
            ids = list(range(start, start + length))
            start += length
            marks = np.zeros(first + said + answered, np.int32)
            marks[first + said :] = ROLES.index("user") + 1
            at = first + said + answered
            turns = [turn(ids[:first], ids[first : first + said]), replace(turn(ids[:at], ids[at:], offset=2), observation_mask=marks)]
            one = replace(rollout(*turns, member=member), task=task)
            mask = np.zeros(length, bool)
            mask[first : first + said] = mask[at:] = True
            logprobs = np.zeros(length, np.float32)
            logprobs[mask] = np.concatenate([each.logprobs for each in turns])
            samples.append(
                TrainingSample(
                    group=number,
                    member=member,
                    env=task.env,
                    token_ids=np.array(ids, np.int32),
                    loss_mask=mask,
                    inference_logprobs=logprobs,
                    advantages=np.where(mask, advantages[member], 0).astype(np.float32),
                    temperature=np.where(mask, 0.75, 1).astype(np.float32),
                    versions=np.where(mask, 0, -1).astype(np.int32),
                )
            )
            users.append(np.concatenate([marks > 0, np.zeros(then, bool)]))
            rollouts.append(one)
        groups.append(Group(id=number, task=task, rollouts=tuple(rollouts), advantages=advantages))
    return groups, samples, users


@pytest.mark.parametrize(("ranks", "tokens"), [(1, 10_000), (2, 60)])
@pytest.mark.parametrize("case", CASES)
def test_weights_of_a_configuration_are_those_of_plain_loops(case: str, ranks: int, tokens: int):
    overrides, by_env = CASES[case]
    config = compose([f"env=[{','.join(ENVS)}]", "hardware=cpu", "loss=grpo", *overrides], environ={}).cfg
    mix, (groups, by_hand, users) = losses_of(config), played()
    batch = make_batch(0, groups, config)
    rows = [pack(batch, rank=rank, ranks=ranks, tokens=tokens, loss_of=mix.loss_of).mini_batches[0] for rank in range(ranks)]
    table = numbers(by_hand)
    found = torch.stack([mix(tokens_of(row, table), part.counts)[0] for part in rows for row in part.micro_batches]).sum()
    if ranks > 1:
        assert min(len(part.micro_batches) for part in rows) > 1

    weighted = []
    for sample, user in zip(by_hand, users, strict=True):
        _, policy, kl, said = by_env[sample.env]
        streams = {"policy_weights": policy * sample.loss_mask, "ref_kl_weights": kl * sample.loss_mask, "ce_weights": said * user}
        weighted.append(replace(sample, **streams))
    places = {(i, t): int(token) for i, s in enumerate(weighted) for t, token in enumerate(s.token_ids)}
    of = [{place: table[name][n] for place, n in places.items()} for name in ("logp", "old", "ref", "entropy")]
    old, ref = ({place: float(number) for place, number in one.items()} for one in of[1:3])
    wanted = naive_total(weighted, {env: spec for env, (spec, *_) in by_env.items()}, of[0], old, ref, of[3])
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)
    ours, theirs = (torch.autograd.grad(total, table["logp"])[0] for total in (found, wanted))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    assert float(ours.norm()) > 0
