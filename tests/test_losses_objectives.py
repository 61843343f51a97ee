"""Every objective against a second implementation (`naive_objectives`): values, gradients, precision, identities, extremes."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import naive_objectives as naive
import pytest
import torch
import yaml
from naive_objectives import NaiveRollout

from rlx.config.loss_traits import ATTRIBUTE
from rlx.config.presets import conf_directory
from rlx.config.schema import LossTerms
from rlx.losses.aipo import aipo, masked_is, opd
from rlx.losses.base import AGGREGATES, Objective
from rlx.losses.cispo import cispo
from rlx.losses.diagnostics import completed
from rlx.losses.dppo import dppo
from rlx.losses.grpo import grpo
from rlx.losses.gspo import gspo, gspo_token
from rlx.losses.opo import opo
from rlx.losses.reinforce import reinforce
from rlx.losses.rloo import rloo
from rlx.losses.sapo import sapo
from rlx.losses.sft import sft
from rlx.losses.tokens import TokenBatch

MAX_LENGTH = 9
N_GROUPS = 3  # of the global batch, as counts below
WIDE = {"eps_low": 0.2, "eps_high": 0.3}
OBJECTIVES = {
    "reinforce": (reinforce, naive.reinforce),
    "sft": (sft, naive.sft),
    "grpo": (grpo, naive.grpo),
    "grpo_wide": (partial(grpo, eps_low=0.1, eps_high=0.6), partial(naive.grpo, low=0.1, high=0.6)),
    "gspo": (gspo, naive.gspo),
    "gspo_wide": (partial(gspo, **WIDE), partial(naive.gspo, low=0.2, high=0.3)),
    "gspo_token": (gspo_token, naive.gspo_token),
    "gspo_token_wide": (partial(gspo_token, **WIDE), partial(naive.gspo_token, low=0.2, high=0.3)),
    "rloo": (rloo, naive.rloo),
    "rloo_tight": (partial(rloo, cap=1.1), partial(naive.rloo, cap=1.1)),
    "opo": (opo, naive.opo),
    "opo_tight": (partial(opo, cap=1.1), partial(naive.opo, cap=1.1)),
    "cispo": (cispo, naive.cispo),
    "cispo_bounded": (partial(cispo, eps_low=0.3, eps_high=0.4), partial(naive.cispo, low=0.3, high=0.4)),
    "aipo": (aipo, naive.aipo),
    "aipo_tight": (partial(aipo, delta=1.1), partial(naive.aipo, delta=1.1)),
    "masked_is": (masked_is, naive.masked_is),
    "masked_is_kl": (partial(masked_is, kl_tau=0.3), partial(naive.masked_is, kl_tau=0.3)),
    "dppo": (dppo, naive.dppo),
    "dppo_tight": (partial(dppo, d_low=0.02, d_high=0.03, kl_tau=0.1), partial(naive.dppo, low=0.02, high=0.03, kl_tau=0.1)),
    "sapo": (sapo, naive.sapo),
    "sapo_steep": (partial(sapo, tau_pos=3.0, tau_neg=5.0), partial(naive.sapo, pos=3.0, neg=5.0)),
    "opd": (opd, naive.opd),
}

# name: lengths of rollouts, spread of log-ratios, advantages (None: random)
CASES = {
    "random": ([3, 5, 2, 7], 0.3, None),
    "group_of_two": ([4, 6], 0.3, [0.7, -0.7]),
    "one_token_rollouts": ([1, 1, 1], 0.3, None),
    "equal_rewards": ([3, 4], 0.3, [0.0, 0.0]),
    "one_rollout_all_masked": ([3, 0, 4], 0.3, None),
    "ratios_far_outside": ([5, 5, 5, 5], 3.0, [1.0, -1.0, 2.0, -2.0]),
    "nothing_trainable": ([0], 0.3, None),
}
FAR = {  # log-ratios that exceed ±20
    "ratios_absurd": ([4, 4, 4, 4], 40.0, [1.0, -1.0, 2.0, -2.0]),
}


def make(case: str, dtype: torch.dtype = torch.float64, on_policy: list[bool] | None = None) -> TokenBatch:
    lengths, spread, given = (CASES | FAR)[case]
    generator = torch.Generator().manual_seed(1)
    n = sum(lengths)

    def normal(size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    advantages = normal(len(lengths)) if given is None else torch.tensor(given, dtype=torch.float64)
    logp = -normal(n).abs() - 0.1
    ref = logp + 0.5 * normal(n)
    old = logp - spread * normal(n)
    return TokenBatch(
        logp=logp.to(dtype, copy=True).requires_grad_(),
        old_logp=old.to(dtype),
        inference_logp=(old + 0.2 * normal(n)).clamp(max=-1e-3).to(dtype),
        entropy=normal(n).abs().to(dtype).requires_grad_(),
        advantages=advantages[ids].to(dtype),
        rollout_ids=ids,
        rollout_lengths=torch.tensor(lengths),
        ref_logp=ref.to(dtype),
        on_policy=None if on_policy is None else torch.tensor(on_policy),
        group_lengths=torch.tensor(
            [sum(lengths[i // 2 * 2 : i // 2 * 2 + 2]) + 3 for i in range(len(lengths))]
        ),  # 3 in other micro-batches
    )


def by_sequence(name: str) -> bool:
    """Whether the objective declares that all tokens carry their sequence's weight."""
    function = OBJECTIVES[name][0]
    return getattr(getattr(function, "func", function), ATTRIBUTE).by_sequence


def changed(tokens: TokenBatch, **values) -> TokenBatch:
    return TokenBatch(**{f: getattr(tokens, f) for f in TokenBatch.__slots__} | values)


def split(tokens: TokenBatch, logp: torch.Tensor, entropy: torch.Tensor) -> list[NaiveRollout]:
    rollouts = []
    for rollout in range(len(tokens.rollout_lengths)):
        at = [i for i in range(len(logp)) if tokens.rollout_ids[i] == rollout]
        old, inf, ref, adv = (
            [float(t[i]) for i in at] for t in (tokens.old_logp, tokens.inference_logp, tokens.ref_logp, tokens.advantages)
        )
        known = tokens.on_policy is not None and bool(tokens.on_policy[rollout])
        rollouts.append(
            NaiveRollout(logp=[logp[i] for i in at], old=old, inf=inf, ref=ref, adv=adv, entropy=[entropy[i] for i in at], on_policy=known)
        )
    return rollouts


def naive_total(tokens: TokenBatch, loss_of, terms: LossTerms, n_tok: int, n_seq: int, penalty_of=None):
    """(total, gradient for logp, gradient for entropy) in float64, of an objective with its terms and a penalty added last."""
    logp, entropy = (t.detach().double().requires_grad_() for t in (tokens.logp, tokens.entropy))
    losses = []
    for r in split(tokens, logp, entropy):
        loss = loss_of(r)
        if terms.dual_clip is not None:
            loss = [naive.smaller(x, -terms.dual_clip * a) if a < 0 else x for x, a in zip(loss, r.adv, strict=True)]
        loss = naive.corrected(loss, r, terms.correction, terms.correction_cap)
        if penalty_of is not None:
            loss = [x + p for x, p in zip(loss, penalty_of(r), strict=True)]
        losses.append(
            [
                x - terms.entropy_coef * h + (terms.kl.beta * naive.kl(terms.kl.estimator, lp, ref) if terms.kl.beta else 0.0)
                for x, h, lp, ref in zip(loss, r.entropy, r.logp, r.ref, strict=True)
            ]
        )
    total = naive.aggregate(terms.aggregate, losses, n_tok, n_seq, MAX_LENGTH, tokens.group_lengths.tolist(), N_GROUPS)
    if not total.requires_grad:
        return total, torch.zeros_like(logp), torch.zeros_like(entropy)
    return total.detach(), *torch.autograd.grad(total, (logp, entropy), allow_unused=True, materialize_grads=True)


def equal_naive(tokens: TokenBatch, function, loss_of, terms: LossTerms, penalty_of=None) -> None:
    n_tok, n_seq = 31, 6  # of the global batch: more than this micro-batch has
    total, stats = Objective(function, terms, max_length=MAX_LENGTH)(tokens, n_tok, n_seq, N_GROUPS)
    wanted, *gradients = naive_total(tokens, loss_of, terms, n_tok, n_seq, penalty_of)
    torch.testing.assert_close(total.detach(), wanted, rtol=1e-9, atol=1e-12)
    found = torch.autograd.grad(total, (tokens.logp, tokens.entropy), allow_unused=True, materialize_grads=True)
    for ours, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-12)
    parts = sum(float(stats.sums[f"loss/{name}"]) for name in ("policy", "kl", "entropy"))
    assert float(stats.sums["loss/total"]) == pytest.approx(float(wanted), rel=1e-9, abs=1e-9)
    assert parts == pytest.approx(float(wanted), rel=1e-9, abs=1e-9)


def test_every_preset_has_a_naive_form():
    presets = {path.stem for path in (conf_directory() / "loss").glob("*.yaml")}
    same = {"dr_grpo", "dapo", "sdft"}  # the first two are grpo with other constants; sdft, opd with its own teacher: mixed_examples.py
    assert presets - same <= OBJECTIVES.keys()


@pytest.mark.parametrize("case", CASES | FAR)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradient_equal_plain_loops(name, case):
    tokens = make(case)
    for aggregate in AGGREGATES if case == "random" else ("seq_mean",):
        equal_naive(tokens, *OBJECTIVES[name], LossTerms(aggregate=aggregate, entropy_coef=0.01))


def test_rloo_weighs_nothing_that_is_on_policy():
    tokens = make("random", on_policy=[True, False, True, False])
    equal_naive(tokens, *OBJECTIVES["rloo"], LossTerms(aggregate="seq_sum"))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("case", ["random", "ratios_far_outside"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradient_in_lower_precision(name, case, dtype, tolerance):
    """Also with the preset's own aggregate."""
    function, loss_of = OBJECTIVES[name]
    tokens = make(case, dtype)
    n = len(tokens.logp)
    preset = max((path.stem for path in (conf_directory() / "loss").glob("*.yaml") if name.startswith(path.stem)), key=len)
    own = yaml.safe_load((conf_directory() / "loss" / f"{preset}.yaml").read_text())["aggregate"]
    for aggregate in {"seq_mean", own}:
        terms = LossTerms(aggregate=aggregate)
        total, _ = Objective(function, terms)(tokens, n, 4)
        (found,) = torch.autograd.grad(total, tokens.logp)
        _, wanted, _ = naive_total(tokens, loss_of, terms, n, 4)
        assert wanted.norm() > 0 or (case, preset) in {("ratios_far_outside", "gspo"), ("ratios_far_outside", "gspo_token")}
        assert found.dtype == dtype
        assert float((found.double() - wanted).norm()) <= tolerance * float(wanted.norm())


@pytest.mark.parametrize("name", [n for n in OBJECTIVES if n not in ("reinforce", "sft", "opd") and not n.startswith("masked_is_kl")])
@pytest.mark.parametrize("case", ["random", "one_token_rollouts", "group_of_two"])
def test_on_policy_the_gradient_is_that_of_reinforce(name, case):
    tokens = make(case)
    here = tokens.logp.detach()
    on_policy = changed(tokens, old_logp=here, inference_logp=here)
    gradients = []
    for function in (OBJECTIVES[name][0], reinforce):
        total, _ = Objective(function, LossTerms(aggregate="seq_mean"))(on_policy, 17, 4)
        gradients.append(torch.autograd.grad(total, tokens.logp)[0])
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-15)


def test_gspo_token_is_gspo_where_a_rollout_has_one_advantage():
    tokens = make("ratios_far_outside")
    gradients = []
    for function in (gspo, gspo_token):
        total, _ = Objective(partial(function, **WIDE), LossTerms(aggregate="seq_mean"))(tokens, 20, 4)
        gradients.append(torch.autograd.grad(total, tokens.logp)[0])
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("proximal", ["both", "old alone", "inference alone"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_log_ratios_of_ten_thousand_stay_finite(name, proximal):
    tokens = make("random", torch.float32)
    shift = torch.where(torch.arange(17) % 2 == 0, -1e4, 1e4)
    old = tokens.old_logp + shift if proximal != "inference alone" else tokens.old_logp
    inf = tokens.inference_logp + shift if proximal != "old alone" else tokens.inference_logp
    far = changed(tokens, old_logp=old, inference_logp=inf, ref_logp=tokens.ref_logp + shift)
    terms = LossTerms(aggregate="token_mean", dual_clip=3.0, correction="seq_tis")
    terms.kl.beta, terms.kl.estimator = 0.1, "k3"
    total, stats = Objective(OBJECTIVES[name][0], terms)(far, 17, 4)
    total.backward()
    assert total.isfinite()
    assert tokens.logp.grad.isfinite().all()
    assert all(value.isfinite() for value in (*stats.sums.values(), *stats.maxima.values()))


def test_clipped_tokens_have_no_gradient_and_are_counted_by_side():
    def batch(advantages: list[float]) -> TokenBatch:
        return TokenBatch(
            logp=torch.log(torch.tensor([1.5, 0.5, 1.0, 1.5, 0.5])).requires_grad_(),
            old_logp=torch.zeros(5),
            inference_logp=torch.zeros(5),
            entropy=torch.ones(5),
            advantages=torch.tensor(advantages),
            rollout_ids=torch.zeros(5, dtype=torch.int64),
            rollout_lengths=torch.tensor([5]),
        )

    tokens = batch([1.0, -1.0, 1.0, -1.0, 1.0])
    total, stats = Objective(grpo, LossTerms(aggregate="token_mean"))(tokens, 5, 1)
    total.backward()
    assert (tokens.logp.grad == 0).tolist() == [True, True, False, False, False]
    metrics = completed({k: float(v) for k, v in stats.sums.items()}, {k: float(v) for k, v in stats.maxima.items()})
    assert metrics["policy/clip_frac_high"] == pytest.approx(0.2)
    assert metrics["policy/clip_frac_low"] == pytest.approx(0.2)
    tokens = batch([1.0, -1.0, 1.0, -1.0, 1.0])
    total, _ = Objective(partial(cispo, eps_high=0.1), LossTerms(aggregate="token_mean"))(tokens, 5, 1)
    total.backward()
    assert (tokens.logp.grad != 0).all(), "cispo drops no token"


@pytest.mark.parametrize("name", ["masked_is", "dppo_tight"])
def test_tokens_that_are_left_out_are_counted(name):
    tokens = make("ratios_far_outside")
    total, stats = Objective(partial(OBJECTIVES[name][0], kl_tau=0.0), LossTerms(aggregate="token_mean"))(tokens, 20, 4)
    (gradient,) = torch.autograd.grad(total, tokens.logp)
    assert 0 < float(stats.sums["policy/masked_frac"]) == pytest.approx(float((gradient == 0).sum()) / 20)


def test_diagnostics_equal_plain_loops():
    tokens = make("random")
    n = len(tokens.logp)
    _, stats = Objective(grpo, LossTerms(aggregate="token_mean"))(tokens, n, 4)
    metrics = completed({k: float(v) for k, v in stats.sums.items()}, {k: float(v) for k, v in stats.maxima.items()})
    ratios = [math.exp((a - b).item()) for a, b in zip(tokens.logp, tokens.old_logp, strict=True)]
    clipped = [(r > 1.2 and a > 0) or (r < 0.8 and a < 0) for r, a in zip(ratios, tokens.advantages, strict=True)]
    assert 0 < sum(clipped) < n
    weights = [0.0 if out else r for r, out in zip(ratios, clipped, strict=True)]
    gaps = [(a - b).item() for a, b in zip(tokens.logp, tokens.inference_logp, strict=True)]
    to_ref = [(b - a).item() for a, b in zip(tokens.logp, tokens.ref_logp, strict=True)]
    wanted = {
        "policy/entropy": float(tokens.entropy.detach().sum()) / n,
        "policy/ratio_mean": sum(ratios) / n,
        "policy/ratio_min": min(ratios),
        "policy/ratio_max": max(ratios),
        "policy/ess": sum(weights) ** 2 / (n * sum(w * w for w in weights)),
        "policy/masked_frac": 0.0,
        "mismatch/kl": sum(math.exp(g) - 1 - g for g in gaps) / n,
        "mismatch/abs_logp_diff_mean": sum(map(abs, gaps)) / n,
        "mismatch/abs_logp_diff_max": max(map(abs, gaps)),
        "mismatch/seq_abs_logp_diff_mean": sum(abs(sum(g) / len(g)) for g in (gaps[:3], gaps[3:8], gaps[8:10], gaps[10:])) / 4,
        "loss/kl": 0.0,
        "ref/kl": sum(math.exp(d) - 1 - d for d in to_ref) / n,
    }
    for name, value in wanted.items():
        assert metrics[name] == pytest.approx(value, rel=1e-9), name


OWN_ADVANTAGE = ("sft", "opd", "masked_is_kl")  # their A does not come from the reward


@pytest.mark.parametrize("terms", [{}, {"dual_clip": 1.5, "correction": "seq_tis"}, {"correction": "mis"}], ids=["alone", "tis", "mis"])
@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name not in OWN_ADVANTAGE])
def test_the_effective_sample_size_is_that_of_the_weights_in_the_gradient(name, terms):
    if by_sequence(name) and terms.get("correction") == "mis":
        terms = {"correction": "seq_mis"}
    tokens = make("ratios_far_outside")
    function = partial(OBJECTIVES[name][0], kl_tau=0.0) if name.startswith("dppo") else OBJECTIVES[name][0]  # without its penalty
    total, stats = Objective(function, LossTerms(aggregate="token_mean", correction_cap=1.1, **terms))(tokens, 20, 4)
    (gradient,) = torch.autograd.grad(total, tokens.logp)
    weights = gradient * 20 / -tokens.advantages
    metrics = completed({k: float(v) for k, v in stats.sums.items()}, {k: float(v) for k, v in stats.maxima.items()})
    size = float(weights.sum() ** 2 / (20 * weights.square().sum().clamp(min=1e-300)))
    assert metrics["policy/ess"] == pytest.approx(size, rel=1e-9)
    if not terms and name in ("reinforce", "aipo"):
        assert (metrics["policy/ess"] == 1.0) is (name == "reinforce"), "without weights every token counts fully"


def test_an_objective_that_names_no_weights_has_the_ratios():
    tokens = make("random")
    _, stats = Objective(lambda t: replace(grpo(t), weight=None), LossTerms(aggregate="token_mean"))(tokens, 17, 4)
    torch.testing.assert_close(stats.sums["weight"], tokens.ratio().detach().mean())


@pytest.mark.parametrize("name", ["grpo", "grpo_wide", "gspo", "gspo_wide", "dppo", "sapo"])
def test_tokens_beyond_the_clamp_of_the_ratio_count_nothing_in_the_effective_sample_size(name):
    """Their gradient is 0, although their ratio is e^20."""
    random = make("ratios_absurd")
    function = partial(OBJECTIVES[name][0], kl_tau=0.0) if name == "dppo" else OBJECTIVES[name][0]
    for tokens in (random, changed(random, old_logp=random.logp.detach() - 30)):
        total, stats = Objective(function, LossTerms(aggregate="token_mean"))(tokens, 16, 4)
        (gradient,) = torch.autograd.grad(total, random.logp)
        weights = gradient * 16 / -tokens.advantages
        assert int((weights == 0).sum()) > 0
        assert float(stats.sums["weight"]) == pytest.approx(float(weights.mean()), rel=1e-9, abs=1e-30)
        assert float(stats.sums["weight_squared"]) == pytest.approx(float(weights.square().mean()), rel=1e-9, abs=1e-30)


def long_rollout(dtype: torch.dtype, n: int = 50_000) -> TokenBatch:
    """One rollout of many tokens, with differences as between a bfloat16 engine and trainer."""
    generator = torch.Generator().manual_seed(0)
    logp = -torch.rand(n, generator=generator, dtype=torch.float64)
    old = logp + 0.03 * torch.randn(n, generator=generator, dtype=torch.float64)
    values = dict(zip(("logp", "old_logp"), (logp.float().to(dtype), old.float().to(dtype)), strict=True))
    values["logp"].requires_grad_()
    return TokenBatch(
        **values,
        inference_logp=values["old_logp"],
        entropy=torch.zeros(n, dtype=dtype),
        advantages=torch.full((n,), 0.7, dtype=dtype),
        rollout_ids=torch.zeros(n, dtype=torch.int64),
        rollout_lengths=torch.tensor([n]),
    )


def test_a_rollout_of_fifty_thousand_float32_tokens_has_the_gradient_of_float64():
    function = partial(gspo, **WIDE)
    for terms in (
        LossTerms(aggregate="seq_mean"),
        LossTerms(aggregate="token_mean"),
        LossTerms(aggregate="seq_mean", correction="seq_tis"),
    ):
        tokens = long_rollout(torch.float32)
        exact = long_rollout(torch.float64)
        n = len(exact.logp)
        ratio = (exact.logp - exact.old_logp).mean().exp()  # the naive form, float64 autograd
        (wanted,) = torch.autograd.grad(-ratio * 0.7 / 2 * (n / 60_000 * 2 if terms.aggregate == "token_mean" else 1), exact.logp)
        total, _ = Objective(function, terms)(tokens, 60_000, 2)
        (found,) = torch.autograd.grad(total, tokens.logp)
        assert float((found.double() - wanted).norm() / wanted.norm()) < 1e-6, terms


def test_lengths_ids_shapes_and_counts_that_do_not_agree_are_refused():
    tokens = make("random")  # rollouts of 3, 5, 2 and 7 tokens
    for wrong, counts, message in (
        ({"advantages": tokens.advantages[:-1]}, (17, 4), r"advantages has shape \[16\], but logp has \[17\]"),
        ({"on_policy": torch.ones(3, dtype=torch.bool)}, (17, 4), r"on_policy has shape \[3\], but rollout_lengths has \[4\]"),
        ({"rollout_lengths": torch.tensor([3, 5, 3, 7])}, (17, 4), "rollout_ids has 2 tokens of rollout 2, but rollout_lengths says 3"),
        (
            {"rollout_lengths": torch.tensor([3, 5, 2]), "group_lengths": None},
            (17, 4),
            "rollout_ids range from 0 to 3, but rollout_lengths has 3 rollouts, 0 to 2",
        ),
        ({}, (16, 4), "has 17 trainable tokens, but the global batch is said to have 16"),
        ({}, (17, 3), "has 4 rollouts with trainable tokens, but the global batch is said to have 3"),
    ):
        with pytest.raises(ValueError, match=message):
            Objective(grpo, LossTerms(aggregate="token_mean"))(changed(tokens, **wrong), *counts)


def test_gspo_counts_clipped_sequences():
    tokens = make("ratios_far_outside")
    _, stats = Objective(gspo, LossTerms(aggregate="seq_mean"))(tokens, 20, 4)
    clipped = float(stats.sums["policy/clip_frac_low"] + stats.sums["policy/clip_frac_high"])
    assert clipped in (0.25, 0.5, 0.75, 1.0)


def test_an_unknown_aggregate_and_a_missing_length_are_refused():
    with pytest.raises(ValueError, match=r"loss\.aggregate is `sum`; it must be one of token_mean"):
        Objective(grpo, LossTerms(aggregate="sum"))
    with pytest.raises(ValueError, match=r"fixed_length divides by loss\.max_length, which is null"):
        Objective(grpo, LossTerms(aggregate="fixed_length"))
    objective = Objective(grpo, LossTerms(aggregate="group_token_mean"))
    for tokens, groups in ((make("random"), None), (changed(make("random"), group_lengths=None), 2)):
        with pytest.raises(ValueError, match="do not say which prompt's group they belong to"):
            objective(tokens, 17, 4, groups)


def test_a_gate_that_cannot_be_and_a_teacher_that_is_not_there_are_refused():
    with pytest.raises(ValueError, match=r"loss\.tau_pos=0\.0 and loss\.tau_neg=1\.05 must be above 0"):
        sapo(make("random"), tau_pos=0.0)
    with pytest.raises(ValueError, match=r"got none; name a teacher: ref\.name or teacher\.base_url"):
        opd(changed(make("random"), ref_logp=None))
