"""Objectives whose importance weights compare with the inference engine: truncated (AIPO), masked, and on-policy distillation."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlx.config.loss_traits import declares
from rlx.losses.tokens import MAX_LOG_RATIO, TokenBatch, TokenLoss, safe_exp


@declares(token_local=True, against_engine=True, ranges={"delta": "above 0"})
def aipo(tokens: TokenBatch, *, delta: float = 8.0) -> TokenLoss:
    """ℓ_t = −sg[min(exp(logp_t − inf_t), δ)] · A_t · logp_t (AIPO of LlamaRL, arXiv 2505.24034 §4.2).

    The ratio compares with the engine that sampled, whatever `loss.proximal` says: one weight corrects both age and numerics.
    """
    ratio = safe_exp(tokens.logp.detach() - tokens.inference_logp)
    weight = ratio.clamp(max=delta)
    return TokenLoss(loss=-weight * tokens.advantages * tokens.logp, weight=weight, clipped_high=ratio > delta)


@declares(
    against_engine=True,
    own_sign="kl_tau",
    ranges={
        "token_low": "at least 0", "token_high": "above 0", "mean_low": "at least 0", "mean_high": "above 0", "token_max": "above 0",
        "kl_tau": "at least 0",
    },
)  # fmt: skip
def masked_is(
    tokens: TokenBatch,
    *,
    token_low: float = 0.125,
    token_high: float = 8.0,
    mean_low: float = 0.1,
    mean_high: float = 10.0,
    token_max: float = 100.0,
    kl_tau: float = 0.0,
) -> TokenLoss:
    """ℓ_t = −sg[exp(logp_t − inf_t) · (A_t − kl_tau · log ρ_t)] · logp_t on kept tokens, 0 on dropped ones.

    A token is dropped if ρ_t is outside [token_low, token_high]. A whole rollout is dropped if the geometric mean of its ratios is outside
    [mean_low, mean_high], or if one of them is above token_max. Outliers are masked, so the weight is not clamped. This is the objective
    of prime-rl's trainer in January 2026.
    """
    log_ratio = (tokens.logp.detach() - tokens.old_logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    mean = safe_exp(tokens.rollout_mean(tokens.logp.detach() - tokens.old_logp))  # [R]
    spoilt = (mean < mean_low) | (mean > mean_high) | (tokens.rollout_sum((ratio > token_max).to(ratio.dtype)) > 0)  # [R]
    low, high = ratio < token_low, ratio > token_high
    dropped = low | high | spoilt[tokens.rollout_ids]
    weight = torch.where(dropped, torch.zeros_like(ratio), safe_exp(tokens.logp.detach() - tokens.inference_logp))
    loss = torch.where(dropped, torch.zeros_like(ratio), -weight * (tokens.advantages - kl_tau * log_ratio) * tokens.logp)
    return TokenLoss(loss=loss, weight=weight, clipped_low=low, clipped_high=high, dropped=dropped)


@declares(against_engine=True, own_sign=True, needs_teacher=True, kind="ref_kl", ranges={"delta": "above 0"})
def opd(tokens: TokenBatch, *, delta: float = 8.0) -> TokenLoss:
    """`aipo` with A_t = teacher_t − sg[logp_t]: reverse KL to a teacher on the policy's own samples (Thinking Machines 2025, 2306.13649).

    The teacher is the one whose log-probabilities came with the samples; without such, the reference model.
    Raises ValueError without a teacher's log-probabilities, or if one is NaN (not scored).
    """
    teacher = tokens.ref_logp if tokens.teacher_logp is None else tokens.teacher_logp
    if teacher is None and len(tokens.logp) == 0:  # a mini-batch without a token to distil has no stream of the teacher
        teacher = tokens.logp.detach()
    if teacher is None:
        raise ValueError("the objective opd needs a teacher's log-probabilities and got none; name a teacher: ref.name or teacher.base_url")
    if bool(teacher.isnan().any()):
        raise ValueError(
            f"the teacher did not score {int(teacher.isnan().sum())} of {len(teacher)} tokens of opd; give such tokens a weight of 0 "
            "(ref_kl_weights), or leave their samples out"
        )
    advantages: Tensor = teacher - tokens.logp.detach()
    ratio = safe_exp(tokens.logp.detach() - tokens.inference_logp)
    weight = ratio.clamp(max=delta)
    return TokenLoss(loss=-weight * advantages * tokens.logp, weight=weight, clipped_high=ratio > delta)


@declares(against_engine=True, own_sign=True, needs_teacher=True, demonstrated=True, kind="ref_kl", ranges={"delta": "above 0"})
def sdft(tokens: TokenBatch, *, delta: float = 8.0) -> TokenLoss:
    """`opd` whose teacher is the policy itself with a demonstration in its prompt (SDFT, arXiv 2601.19897).

    A_t = log π(y_t | prompt, demonstration, y_<t) − sg[logp_t]: the reverse KL on the policy's own samples, by the sampled token.
    Raises ValueError without the teacher's log-probabilities. A reference model never stands in for them.
    """
    return opd(replace(tokens, ref_logp=None), delta=delta)
