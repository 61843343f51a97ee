"""Every objective against an independent form: Python loops over rollouts and tokens in float64, gradients by autograd of those loops."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from rlx.config.schema import LossTerms
from rlx.losses.base import AGGREGATES, Objective, TokenBatch, finish
from rlx.losses.cispo import cispo
from rlx.losses.grpo import grpo
from rlx.losses.gspo import gspo
from rlx.losses.reinforce import reinforce
from rlx.losses.sft import sft

MAX_LENGTH = 9


def clip(x, low, high):
    return min(max(x, low), high)


def naive_reinforce(logp, old, advantages):
    return [-a * lp for lp, a in zip(logp, advantages, strict=True)]


def naive_sft(logp, old, advantages):
    return [-lp for lp in logp]


def naive_grpo(logp, old, advantages, low=0.2, high=0.2):
    loss = []
    for lp, o, a in zip(logp, old, advantages, strict=True):
        ratio = torch.exp(lp - o)
        loss.append(-min(ratio * a, clip(ratio, 1 - low, 1 + high) * a))
    return loss


def naive_gspo(logp, old, advantages, low=3e-4, high=4e-4):
    if not logp:
        return []
    ratio = torch.exp(sum(lp - o for lp, o in zip(logp, old, strict=True)) / len(logp))
    a = advantages[0]  # outcome credit: the same for every token
    return [-min(ratio * a, clip(ratio, 1 - low, 1 + high) * a)] * len(logp)


def naive_cispo(logp, old, advantages, low=1.0, high=4.0):
    return [-clip(math.exp((lp - o).item()), 1 - low, 1 + high) * a * lp for lp, o, a in zip(logp, old, advantages, strict=True)]


OBJECTIVES = {
    "reinforce": (reinforce, naive_reinforce),
    "sft": (sft, naive_sft),
    "grpo": (grpo, naive_grpo),
    "grpo_wide": (partial(grpo, eps_low=0.1, eps_high=0.6), partial(naive_grpo, low=0.1, high=0.6)),
    "gspo": (gspo, naive_gspo),
    "gspo_wide": (partial(gspo, eps_low=0.2, eps_high=0.3), partial(naive_gspo, low=0.2, high=0.3)),
    "cispo": (cispo, naive_cispo),
    "cispo_bounded": (partial(cispo, eps_low=0.3, eps_high=0.4), partial(naive_cispo, low=0.3, high=0.4)),
}


def naive_aggregate(name, losses, n_tok, n_seq):
    zero = torch.zeros((), dtype=torch.float64)
    if name == "token_mean":
        return sum((sum(loss, zero) for loss in losses), zero) / n_tok
    if name == "seq_mean":
        return sum((sum(loss, zero) / len(loss) for loss in losses if loss), zero) / n_seq
    if name == "seq_sum":
        return sum((sum(loss, zero) for loss in losses), zero) / n_seq
    return sum((sum(loss, zero) for loss in losses), zero) / (n_seq * MAX_LENGTH)


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


def make(case: str, dtype: torch.dtype = torch.float64) -> TokenBatch:
    lengths, spread, given = CASES[case]
    generator = torch.Generator().manual_seed(1)
    n = sum(lengths)

    def normal(size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    advantages = normal(len(lengths)) if given is None else torch.tensor(given, dtype=torch.float64)
    logp = -normal(n).abs() - 0.1
    old = logp - spread * normal(n)
    return TokenBatch(
        logp=logp.to(dtype).requires_grad_(),
        old_logp=old.to(dtype),
        inference_logp=(old + 0.01 * normal(n)).to(dtype),
        entropy=normal(n).abs().to(dtype).requires_grad_(),
        advantages=advantages[ids].to(dtype),
        rollout_ids=ids,
        rollout_lengths=torch.tensor(lengths),
    )


def naive_loss(tokens: TokenBatch, naive, aggregate: str, entropy_coef: float, n_tok: int, n_seq: int):
    """(total, gradient for logp, gradient for entropy) in float64."""
    logp, entropy = (t.detach().double().requires_grad_() for t in (tokens.logp, tokens.entropy))
    losses, entropies = [], []
    for rollout in range(len(tokens.rollout_lengths)):
        at = [i for i in range(len(logp)) if tokens.rollout_ids[i] == rollout]
        losses.append(naive([logp[i] for i in at], [tokens.old_logp[i].double() for i in at], [tokens.advantages[i].double() for i in at]))
        entropies.append([-entropy_coef * entropy[i] for i in at])
    total = naive_aggregate(aggregate, losses, n_tok, n_seq) + naive_aggregate(aggregate, entropies, n_tok, n_seq)
    if not total.requires_grad:
        return total, torch.zeros_like(logp), torch.zeros_like(entropy)
    return total.detach(), *torch.autograd.grad(total, (logp, entropy), allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradient_equal_plain_loops(name, case, aggregate):
    function, naive = OBJECTIVES[name]
    tokens = make(case)
    n_tok, n_seq = 31, 6  # of the global batch: more than this micro-batch has
    total, stats = Objective(function, LossTerms(aggregate=aggregate, entropy_coef=0.01), max_length=MAX_LENGTH)(tokens, n_tok, n_seq)
    wanted, *gradients = naive_loss(tokens, naive, aggregate, 0.01, n_tok, n_seq)
    torch.testing.assert_close(total.detach(), wanted, rtol=1e-9, atol=1e-12)
    found = torch.autograd.grad(total, (tokens.logp, tokens.entropy), allow_unused=True, materialize_grads=True)
    for ours, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-12)
    assert float(stats.sums["loss/total"]) == pytest.approx(float(wanted), abs=1e-9)
    assert float(stats.sums["loss/policy"] + stats.sums["loss/entropy"]) == pytest.approx(float(wanted), abs=1e-9)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("name", [name for name in OBJECTIVES if "gspo" not in name])
def test_gradient_in_lower_precision(name, dtype, tolerance):
    function, naive = OBJECTIVES[name]
    tokens = make("random", dtype)
    total, _ = Objective(function, LossTerms(aggregate="seq_mean"))(tokens, 17, 4)
    (found,) = torch.autograd.grad(total, tokens.logp)
    _, wanted, _ = naive_loss(tokens, naive, "seq_mean", 0.0, 17, 4)
    assert float((found.double() - wanted).norm() / wanted.norm()) < tolerance


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("case", ["random", "one_token_rollouts", "group_of_two"])
def test_on_policy_the_gradient_is_that_of_reinforce(name, case):
    tokens = make(case)
    on_policy = TokenBatch(**{f: getattr(tokens, f) for f in TokenBatch.__slots__} | {"old_logp": tokens.logp.detach()})
    gradients = []
    for function in (OBJECTIVES[name][0], reinforce):
        total, _ = Objective(function, LossTerms(aggregate="seq_mean"))(on_policy, 17, 4)
        gradients.append(torch.autograd.grad(total, tokens.logp)[0])
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_infinite_log_ratios_stay_finite(name):
    tokens = make("random", torch.float32)
    far = TokenBatch(
        **{f: getattr(tokens, f) for f in TokenBatch.__slots__}
        | {"old_logp": torch.where(torch.arange(17) % 2 == 0, tokens.old_logp - 5000, tokens.old_logp + 5000)}
    )
    total, stats = Objective(OBJECTIVES[name][0], LossTerms(aggregate="token_mean"))(far, 17, 4)
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
    metrics = finish({k: float(v) for k, v in stats.sums.items()}, {k: float(v) for k, v in stats.maxima.items()})
    assert metrics["policy/clip_frac_high"] == pytest.approx(0.2)
    assert metrics["policy/clip_frac_low"] == pytest.approx(0.2)
    tokens = batch([1.0, -1.0, 1.0, -1.0, 1.0])
    total, _ = Objective(partial(cispo, eps_high=0.1), LossTerms(aggregate="token_mean"))(tokens, 5, 1)
    total.backward()
    assert (tokens.logp.grad != 0).all(), "cispo drops no token"


def test_diagnostics_equal_plain_loops():
    tokens = make("random")
    n = len(tokens.logp)
    _, stats = Objective(grpo, LossTerms(aggregate="token_mean"))(tokens, n, 4)
    metrics = finish({k: float(v) for k, v in stats.sums.items()}, {k: float(v) for k, v in stats.maxima.items()})
    ratios = [math.exp((a - b).item()) for a, b in zip(tokens.logp, tokens.old_logp, strict=True)]
    gaps = [(a - b).item() for a, b in zip(tokens.logp, tokens.inference_logp, strict=True)]
    wanted = {
        "policy/entropy": float(tokens.entropy.sum()) / n,
        "policy/ratio_mean": sum(ratios) / n,
        "policy/ratio_min": min(ratios),
        "policy/ratio_max": max(ratios),
        "policy/ess": sum(ratios) ** 2 / (n * sum(r * r for r in ratios)),
        "policy/masked_frac": 0.0,
        "mismatch/kl": sum(math.exp(g) - 1 - g for g in gaps) / n,
        "mismatch/abs_logp_diff_mean": sum(map(abs, gaps)) / n,
        "mismatch/abs_logp_diff_max": max(map(abs, gaps)),
        "loss/kl": 0.0,
    }
    for name, value in wanted.items():
        assert metrics[name] == pytest.approx(value, rel=1e-9), name


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
