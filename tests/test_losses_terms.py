"""The terms that join any objective, and the weights of an environment."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import naive_objectives as naive
import numpy as np
import pytest
import torch
from mixed_examples import Spec, naive_total, terms
from naive_objectives import kl, squared
from test_losses_mix import numbers, tokens_of
from test_losses_objectives import OBJECTIVES, by_sequence, changed, equal_naive, make
from test_rollout_samples import rollout, turn

from rlx.config.load import compose
from rlx.config.schema import KlTerms, LossTerms
from rlx.data.packing import pack
from rlx.losses.aipo import opd
from rlx.losses.base import Objective
from rlx.losses.grpo import grpo
from rlx.losses.terms import KlController, kl_estimate
from rlx.policy.observation_mask import ROLES
from rlx.rollout.batch import make_batch
from rlx.train.build import losses_of
from rlx.types import Group, Task, TrainingSample

PENALTIES = {"dppo": 1e-3, "dppo_tight": 0.1}  # weights of the penalties, which are added after correction and dual clip
SOME = ("grpo", "gspo_wide", "rloo", "aipo", "dppo_tight")


def apart(name):
    """An objective, its naive form without a penalty, and the penalty's naive form or None."""
    function, loss_of = OBJECTIVES[name]
    if name not in PENALTIES:
        return function, loss_of, None
    return function, partial(loss_of, kl_tau=0.0), partial(squared, kl_tau=PENALTIES[name])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_all_terms_join_any_objective(name):
    kl = KlTerms(beta=0.3, estimator="k3")
    terms = LossTerms(aggregate="seq_mean", dual_clip=1.5, correction="seq_tis", correction_cap=1.1, entropy_coef=0.02, kl=kl)
    function, loss_of, penalty_of = apart(name)
    equal_naive(make("ratios_far_outside"), function, loss_of, terms, penalty_of)


@pytest.mark.parametrize("name", ["grpo", "gspo_wide", *PENALTIES])
def test_the_dual_clip_alone(name):
    function, loss_of, penalty_of = apart(name)
    equal_naive(make("ratios_far_outside"), function, loss_of, LossTerms(aggregate="token_mean", dual_clip=1.2), penalty_of)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", SOME)
def test_the_kl_term(name, estimator):
    equal_naive(make("random"), *OBJECTIVES[name], LossTerms(aggregate="seq_mean", kl=KlTerms(beta=0.3, estimator=estimator)))


@pytest.mark.parametrize("correction", ["tis", "mis", "seq_tis", "seq_mis"])
@pytest.mark.parametrize("name", SOME)
def test_the_corrections(name, correction):
    for cap in (1.05, 2.0):
        function, loss_of, penalty_of = apart(name)
        terms = LossTerms(aggregate="token_mean", correction=correction, correction_cap=cap)
        if by_sequence(name) and not correction.startswith("seq_"):
            with pytest.raises(ValueError, match=f"correction is {correction}, which works by token.*set seq_{correction}"):
                Objective(function, terms)(make("random"), 31, 6)
            continue
        equal_naive(make("random"), function, loss_of, terms, penalty_of)


def test_what_a_correction_leaves_out_is_counted_and_keeps_its_penalty():
    tokens = make("random")
    objective = Objective(OBJECTIVES["dppo"][0], LossTerms(aggregate="token_mean", correction="mis", correction_cap=1.0))
    total, stats = objective(tokens, 17, 4)
    assert float(stats.sums["policy/masked_frac"]) == 1.0
    penalty = 1e-3 * (tokens.logp - tokens.inference_logp).square().mean()
    torch.testing.assert_close(total, penalty)


def test_dual_clip_holds_only_what_is_bad_and_far_more_likely_now():
    tokens = make("random")
    logs = torch.tensor([0.0, 3.0, -3.0] * 6)[:17].double()
    for advantage, held in ((1.0, False), (-1.0, True)):
        far = changed(tokens, old_logp=tokens.logp.detach() - logs, advantages=torch.full((17,), advantage, dtype=torch.float64))
        total, _ = Objective(lambda t: grpo(t, eps_low=0.99, eps_high=1e9), LossTerms(aggregate="token_mean", dual_clip=3.0))(far, 17, 4)
        (gradient,) = torch.autograd.grad(total, tokens.logp)
        assert (gradient == 0).tolist() == [held and x == 3.0 for x in logs.tolist()]


def test_the_estimators_agree_in_expectation_and_k2_has_the_gradient_of_the_kl():
    logits = torch.tensor([0.3, -1.0, 0.7], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.1, -0.4], dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    kl = (logp.exp() * (logp - reference)).sum()
    (wanted,) = torch.autograd.grad(kl, logits, retain_graph=True)
    weights = logp.detach().exp()  # the policy's probabilities of its three tokens, to compute exact expectations
    for name, unbiased in (("k1", True), ("k2", False), ("k3", True)):
        estimate = (weights * kl_estimate(name, logp, reference)).sum()
        (gradient,) = torch.autograd.grad(estimate, logits, retain_graph=True)
        assert (abs(float(estimate.detach() - kl.detach())) < 1e-12) is unbiased, name
        assert torch.allclose(gradient, wanted, atol=1e-12) is (name == "k2"), name
        assert bool((gradient.abs() < 1e-12).all()) is (name == "k1"), name


def test_k3_never_pushes_the_policy_away_from_the_reference():
    d = torch.tensor([-25.0, -1.0, 1.0, 19.0, 25.0], dtype=torch.float64)
    logp = torch.zeros_like(d).requires_grad_()
    estimate = kl_estimate("k3", logp, d)
    (gradient,) = torch.autograd.grad(estimate.sum(), logp)
    naive = [kl("k3", torch.zeros((), dtype=torch.float64), float(x)) for x in d]
    torch.testing.assert_close(estimate.detach(), torch.stack([torch.as_tensor(x) for x in naive]))
    assert gradient.sign().tolist() == [1, 1, -1, -1, 0], "descent moves towards the reference; the clamp has no gradient"


def test_the_controller_moves_beta_towards_the_target_by_bounded_steps():
    constant, moved = KlController(0.1, None, 0.1), KlController(0.1, 0.02, 0.1)
    constant.update(5.0)
    assert constant.beta == 0.1
    moved.update(0.04)  # far above the target: the error is clipped to 0.2
    assert moved.beta == pytest.approx(0.1 * 1.02)
    moved.update(0.0)
    assert moved.beta == pytest.approx(0.1 * 1.02 * 0.98)
    moved.update(0.02 * 1.1)
    assert moved.beta == pytest.approx(0.1 * 1.02 * 0.98 * 1.01)


def test_a_kl_term_without_a_reference_is_refused_and_beta_is_saved():
    objective = Objective(grpo, LossTerms(aggregate="token_mean", kl=KlTerms(beta=0.1, target_kl=0.01)))
    with pytest.raises(ValueError, match=r"loss\.kl\.beta is 0\.1, but there is no reference model"):
        objective(changed(make("random"), ref_logp=None), 17, 4)
    objective.after_update({"ref/kl": 1.0})
    other = Objective(grpo, LossTerms(aggregate="token_mean", kl=KlTerms(beta=0.1, target_kl=0.01)))
    other.load_state_dict(objective.state_dict())
    assert other.controller.beta == objective.controller.beta == pytest.approx(0.102)


ENVS = ("sums", "reverse_text", "word_guess")
REFERENCE, USERS = ("ref.name=other/model", "loss.kl.beta=0.2"), ("loss.ce_coef=0.5", "envs.sums.observation_ce_weights.user=0.7")
POLICY = ("envs.sums.loss_weights.policy=0.5", "envs.word_guess.loss_weights.policy=2")
KL = ("envs.sums.loss_weights.ref_kl=2", "envs.word_guess.loss_weights.ref_kl=0.25")

OWN = (
    *("envs.word_guess.loss.kl.beta=0.3", "envs.word_guess.loss.ce_coef=0.1", "envs.word_guess.observation_ce_weights.user=2"),
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
        (*USERS, "envs.word_guess.observation_ce_weights.user=2"),
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
