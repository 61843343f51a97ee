"""REINFORCE with a leave-one-out baseline. The sequence is the action, so one ratio weighs the whole sequence."""

from __future__ import annotations

import torch

from rlx.config.loss_traits import declares
from rlx.losses.tokens import TokenBatch, TokenLoss, safe_exp


@declares(by_sequence=True, ranges={"cap": "above 0"})
def rloo(tokens: TokenBatch, *, cap: float = 10.0) -> TokenLoss:
    """ℓ_i = −sg[min(ρ_i, cap)] · mean_t(A_t · logp_t), ρ_i = exp(Σ_t(logp_t − old_t)), the product over the sequence (arXiv 2402.14740).

    The paper is on-policy; the capped ratio corrects rollouts of older versions. The ratio is exactly 1 for rollouts that
    `tokens.on_policy` marks, because there trainer and engine differ only by rounding.
    Each token carries ℓ_i, so `aggregate: seq_sum` gives the paper's mean over sequences of A_i · log π(y_i).
    """
    ratio = safe_exp(tokens.rollout_sum(tokens.logp.detach() - tokens.old_logp))  # [R]
    if tokens.on_policy is not None:
        ratio = torch.where(tokens.on_policy, torch.ones_like(ratio), ratio)
    weight = ratio.clamp(max=cap)
    return TokenLoss(
        loss=-weight * tokens.rollout_mean(tokens.advantages * tokens.logp),
        weight=weight,
        clipped_high=ratio > cap,
        unit="sequence",
    )
