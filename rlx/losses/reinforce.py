"""REINFORCE: the plain policy gradient, without ratio or clipping."""

from __future__ import annotations

import torch

from rlx.config.loss_traits import declares
from rlx.losses.tokens import TokenBatch, TokenLoss


@declares(token_local=True, uses_ratio=False)
def reinforce(tokens: TokenBatch) -> TokenLoss:
    """ℓ_t = −A_t · logp_t (Williams 1992). Off-policy tokens are used as if they were on-policy."""
    return TokenLoss(loss=-tokens.advantages * tokens.logp, weight=torch.ones_like(tokens.logp))
