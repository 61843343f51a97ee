"""On-policy optimisation with the length-weighted baseline (`advantage=opo`)."""

from __future__ import annotations

from rlx.losses.tokens import TokenBatch, TokenLoss


def opo(tokens: TokenBatch, *, cap: float = 10.0) -> TokenLoss:
    """ℓ_t = −sg[min(ρ_t, cap)] · A_t · logp_t (OPO, arXiv 2505.23585).

    The paper trains on exactly the policy that sampled (ρ_t = 1); the capped ratio is for tokens of older versions.
    """
    weight = tokens.ratio().detach()
    return TokenLoss(loss=-weight.clamp(max=cap) * tokens.advantages * tokens.logp, clipped_high=weight > cap)
