"""Supervised fine-tuning: cross-entropy on the trainable tokens."""

from __future__ import annotations

from rlx.losses.tokens import TokenBatch, TokenLoss


def sft(tokens: TokenBatch) -> TokenLoss:
    """ℓ_t = −logp_t. Advantages and ratios play no part."""
    return TokenLoss(loss=-tokens.logp)
