"""Soft adaptive policy optimisation: a smooth gate on the ratio instead of a clip."""

from __future__ import annotations

import torch

from rlx.config.loss_traits import declares
from rlx.losses.tokens import TokenBatch, TokenLoss, ratio_weight


@declares(token_local=True, ranges={"tau_pos": "above 0", "tau_neg": "above 0"})
def sapo(tokens: TokenBatch, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> TokenLoss:
    """ℓ_t = −f(ρ_t) A_t, f(ρ) = σ(τ(ρ−1)) · 4/τ with τ = tau_pos where A_t > 0, else tau_neg (SAPO, arXiv 2511.20347).

    f has slope 1 at ρ = 1 and flattens on both sides, faster for a larger τ. Raises ValueError for a τ that is not above 0.
    """
    if tau_pos <= 0 or tau_neg <= 0:
        raise ValueError(f"loss.tau_pos={tau_pos} and loss.tau_neg={tau_neg} must be above 0: the gate divides by them")
    ratio = tokens.ratio()
    tau = torch.where(tokens.advantages > 0, torch.full_like(ratio, tau_pos), torch.full_like(ratio, tau_neg))
    gate = torch.sigmoid(tau * (ratio - 1))
    weight = 4 * gate * (1 - gate) * ratio_weight(tokens.logp - tokens.old_logp)
    return TokenLoss(loss=-gate * (4 / tau) * tokens.advantages, weight=weight)
