"""CISPO: the importance weight is clipped, the gradient is not; no token is dropped."""

from __future__ import annotations

from rlx.config.loss_traits import declares
from rlx.losses.tokens import TokenBatch, TokenLoss


@declares(token_local=True, ranges={"eps_low": "above 0 and at most 1", "eps_high": "above 0"})
def cispo(tokens: TokenBatch, *, eps_low: float = 1.0, eps_high: float = 4.0) -> TokenLoss:
    """ℓ_t = −sg[clip(ρ_t, 1−ε_low, 1+ε_high)] · A_t · logp_t (MiniMax-M1, arXiv 2506.13585 eq. 4 and 5).

    `eps_low` of 1 means no lower bound. `eps_high` is a distance: the upper bound is 1 + eps_high.
    """
    ratio = tokens.ratio().detach()
    weight = ratio.clamp(1 - eps_low, 1 + eps_high)
    return TokenLoss(
        loss=-weight * tokens.advantages * tokens.logp,
        weight=weight,
        clipped_low=ratio < 1 - eps_low,
        clipped_high=ratio > 1 + eps_high,
    )
