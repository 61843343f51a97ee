"""Group sequence policy optimisation: one ratio per sequence, the geometric mean of its token ratios."""

from __future__ import annotations

import torch

from rlx.config.loss_traits import declares
from rlx.losses.tokens import TokenBatch, TokenLoss, ratio_weight, safe_exp


@declares(by_sequence=True, sequence_bounds=("eps_low", "eps_high"), ranges={"eps_low": "above 0 and at most 1", "eps_high": "above 0"})
def gspo(tokens: TokenBatch, *, eps_low: float = 3e-4, eps_high: float = 4e-4) -> TokenLoss:
    """ℓ_i = −min(s_i A_i, clip(s_i, 1−ε_low, 1+ε_high) A_i), s_i = exp(mean_t(logp_t − old_t)) (GSPO, arXiv 2507.18071 eq. 5 and 7).

    Every token of rollout i carries ℓ_i, so `aggregate: seq_mean` gives the paper's mean over sequences.
    A_i is the mean advantage of the rollout's tokens. `eps_high` is a distance: the upper bound is 1 + eps_high.
    """
    log_ratio = tokens.rollout_mean(tokens.logp - tokens.old_logp)  # [R]
    ratio = safe_exp(log_ratio)
    advantages = tokens.rollout_mean(tokens.advantages)  # [R]
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages)
    low, high = (advantages < 0) & (ratio < 1 - eps_low), (advantages > 0) & (ratio > 1 + eps_high)
    return TokenLoss(
        loss=loss,
        weight=torch.where(low | high, torch.zeros_like(ratio), ratio_weight(log_ratio)),
        clipped_low=low,
        clipped_high=high,
        unit="sequence",
    )


@declares(sequence_bounds=("eps_low", "eps_high"), ranges={"eps_low": "above 0 and at most 1", "eps_high": "above 0"})
def gspo_token(tokens: TokenBatch, *, eps_low: float = 3e-4, eps_high: float = 4e-4) -> TokenLoss:
    """ℓ_t = −min(s_t A_t, clip(s_t, 1−ε_low, 1+ε_high) A_t), s_t = sg[s_i] · exp(logp_t − sg[logp_t]).

    GSPO-token, arXiv 2507.18071 eq. 13 and 14. s_t has the value of the sequence's ratio but only the token's own gradient, so each token
    may have its own advantage. If all tokens of a rollout share one advantage, value and gradient equal those of `gspo`.
    """
    sequence = safe_exp(tokens.rollout_mean(tokens.logp - tokens.old_logp)).detach()[tokens.rollout_ids]  # [N]
    ratio, advantages = sequence * (tokens.logp - tokens.logp.detach()).exp(), tokens.advantages
    low, high = (advantages < 0) & (sequence < 1 - eps_low), (advantages > 0) & (sequence > 1 + eps_high)
    return TokenLoss(
        loss=-torch.minimum(ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages),
        weight=torch.where(low | high, torch.zeros_like(sequence), sequence),
        clipped_low=low,
        clipped_high=high,
    )
