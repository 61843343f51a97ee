"""REINFORCE: the policy gradient itself, without ratio or clipping."""

from __future__ import annotations

from rlx.losses.tokens import TokenBatch, TokenLoss


def reinforce(tokens: TokenBatch) -> TokenLoss:
    """ℓ_t = −A_t · logp_t (Williams 1992). Off-policy tokens are used as if they were on-policy."""
    return TokenLoss(loss=-tokens.advantages * tokens.logp)
