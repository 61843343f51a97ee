"""Supervised fine-tuning: cross-entropy on the trainable tokens."""

from __future__ import annotations

import torch

from rlx.config.loss_traits import declares
from rlx.losses.tokens import TokenBatch, TokenLoss


@declares(token_local=True, uses_ratio=False, own_sign=True, kind="ce")
def sft(tokens: TokenBatch) -> TokenLoss:
    """ℓ_t = −logp_t. Ignores advantages and ratios."""
    return TokenLoss(loss=-tokens.logp, weight=torch.ones_like(tokens.logp))
