"""On-policy optimisation with the length-weighted baseline (`advantage=opo`)."""

from __future__ import annotations

from rlx.config.loss_traits import declares
from rlx.losses.tokens import TokenBatch, TokenLoss


@declares(token_local=True, ranges={"cap": "above 0"})
def opo(tokens: TokenBatch, *, cap: float = 10.0) -> TokenLoss:
    """ℓ_t = −sg[min(ρ_t, cap)] · A_t · logp_t (OPO, arXiv 2505.23585).

    The paper trains on-policy (ρ_t = 1). The capped ratio corrects tokens of older policy versions.
    """
    ratio = tokens.ratio().detach()
    weight = ratio.clamp(max=cap)
    return TokenLoss(loss=-weight * tokens.advantages * tokens.logp, weight=weight, clipped_high=ratio > cap)
