"""The clipped token-ratio surrogate of PPO with group-relative advantages."""

from __future__ import annotations

import torch

from rlx.config.loss_traits import declares
from rlx.losses.tokens import TokenBatch, TokenLoss, ratio_weight


@declares(token_local=True, ranges={"eps_low": "above 0 and at most 1", "eps_high": "above 0"})
def grpo(tokens: TokenBatch, *, eps_low: float = 0.2, eps_high: float = 0.2) -> TokenLoss:
    """ℓ_t = −min(ρ_t A_t, clip(ρ_t, 1−ε_low, 1+ε_high) A_t) (GRPO, arXiv 2402.03300 eq. 3, without its KL term).

    `eps_high` is a distance: the upper bound is 1 + eps_high.
    """
    ratio, advantages = tokens.ratio(), tokens.advantages
    high = (advantages > 0) & (ratio > 1 + eps_high)
    low = (advantages < 0) & (ratio < 1 - eps_low)
    return TokenLoss(
        loss=-torch.minimum(ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages),
        weight=torch.where(low | high, torch.zeros_like(ratio), ratio_weight(tokens.logp - tokens.old_logp)),
        clipped_low=low,
        clipped_high=high,
    )
