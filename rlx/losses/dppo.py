"""DPPO: a trust region in probability space. Tokens whose probability moved too far in the direction of their advantage are dropped."""

from __future__ import annotations

import torch

from rlx.config.loss_traits import declares
from rlx.losses.tokens import TokenBatch, TokenLoss, ratio_weight


@declares(token_local=True, ranges={"d_low": "above 0", "d_high": "above 0", "kl_tau": "at least 0"})
def dppo(tokens: TokenBatch, *, d_low: float = 0.2, d_high: float = 0.2, kl_tau: float = 1e-3) -> TokenLoss:
    """ℓ_t = −ρ_t A_t on kept tokens, plus kl_tau · (logp_t − inf_t)² on every token (DPPO, binary total variation, arXiv 2602.04879).

    π_t and μ_t are the token's probabilities under trainer and inference engine. A token is dropped if A_t > 0 and π_t − μ_t > d_high,
    or if A_t < 0 and π_t − μ_t < −d_low. The squared term comes from arXiv 2602.02276.
    """
    ratio, advantages = tokens.ratio(), tokens.advantages
    moved = tokens.logp.detach().exp() - tokens.inference_logp.exp()
    low, high = (advantages < 0) & (moved < -d_low), (advantages > 0) & (moved > d_high)
    dropped = low | high
    return TokenLoss(
        loss=torch.where(dropped, torch.zeros_like(ratio), -ratio * advantages),
        weight=torch.where(dropped, torch.zeros_like(ratio), ratio_weight(tokens.logp - tokens.old_logp)),
        penalty=kl_tau * (tokens.logp - tokens.inference_logp).square(),
        clipped_low=low,
        clipped_high=high,
        dropped=dropped,
    )
