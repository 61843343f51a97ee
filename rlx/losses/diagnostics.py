"""The metrics that every objective reports, under the same names. `rlx.metrics` documents them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlx.losses.terms import kl_estimate
from rlx.losses.tokens import MAX_LOG_RATIO, TokenBatch, TokenLoss


@dataclass(slots=True)
class Stats:
    """Diagnostics that combine over micro-batches and ranks, as sums or as maxima. All are zero-dimensional tensors."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def add(self, other: Stats) -> None:
        for name, value in other.sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        for name, value in other.maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value


@torch.no_grad()
def diagnostics(tokens: TokenBatch, result: TokenLoss, num_loss_tokens: int, num_sequences: int) -> Stats:
    """The diagnostics of one micro-batch, from float64 `tokens` and the `result` after dual clip and correction (its weight is set).

    Means are already shares of the global batch. `completed` completes `policy/ess`.
    """
    assert result.weight is not None
    per_token = 1.0 / max(num_loss_tokens, 1)
    per_unit = per_token if result.unit == "token" else 1.0 / max(num_sequences, 1)
    ratio, difference = tokens.ratio(), tokens.logp - tokens.inference_logp
    weight, dropped = result.weight, result.dropped
    if result.unit == "sequence":  # each token carries its sequence's values
        weight, dropped = weight[tokens.rollout_ids], None if dropped is None else dropped[tokens.rollout_ids]
    log_ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3 = log_ratio.expm1() - log_ratio  # estimates KL(inference ‖ trainer), because the engine sampled the tokens
    zero = ratio.new_zeros(())

    def count(mask: Tensor | None) -> Tensor:
        return zero if mask is None else mask.sum().double()

    stats = Stats(
        sums={
            "policy/entropy": tokens.entropy.sum() * per_token,
            "policy/clip_frac_low": count(result.clipped_low) * per_unit,
            "policy/clip_frac_high": count(result.clipped_high) * per_unit,
            "policy/masked_frac": count(dropped) * per_token,
            "policy/ratio_mean": ratio.sum() * per_token,
            "weight": weight.sum() * per_token,
            "weight_squared": weight.square().sum() * per_token,
            "tokens": zero + len(ratio),
            "sequences": (tokens.rollout_lengths.double() / tokens.whole_lengths.clamp(min=1)).sum(),  # a split rollout's parts add up
            "mismatch/kl": k3.sum() * per_token,
            "mismatch/abs_logp_diff_mean": difference.abs().sum() * per_token,
            "mismatch/seq_abs_logp_diff_mean": tokens.rollout_mean(difference).abs().sum() / max(num_sequences, 1),
        }
    )
    if tokens.group_lengths is not None:  # the tokens of a group add up to one
        stats.sums["groups"] = (tokens.rollout_lengths.double() / tokens.group_lengths.clamp(min=1)).sum()
    if tokens.ref_logp is not None:
        stats.sums["ref/kl"] = kl_estimate("k3", tokens.logp, tokens.ref_logp).sum() * per_token
    if len(ratio):
        stats.maxima = {
            "policy/ratio_max": ratio.max(),
            "minus_ratio_min": -ratio.min(),
            "mismatch/abs_logp_diff_max": difference.abs().max(),
        }
    else:
        never = torch.full_like(zero, -torch.inf)
        stats.maxima = {"policy/ratio_max": never, "minus_ratio_min": never, "mismatch/abs_logp_diff_max": never}
    return stats


def check_counts(sums: dict[str, float], num_loss_tokens: int, num_sequences: int, num_groups: int | None = None) -> None:
    """Raise ValueError unless the reduced stats count as many tokens, sequences and groups as the losses were divided by.

    `num_groups`: None if nothing was divided by it.
    """
    for name, expected in (("tokens", num_loss_tokens), ("sequences", num_sequences), ("groups", num_groups)):
        # Groups are sums of their rollouts' shares, and sequences of their parts', so they are integers only up to rounding.
        rounding = 0.0 if name == "tokens" else 1e-3  # float64 sums of millions of shares are far more exact
        if expected is not None and name in sums and abs(sums[name] - expected) > rounding:
            raise ValueError(
                f"the mini-batch has {sums[name]:g} trainable {name} over all ranks and micro-batches, but losses were divided by "
                f"{expected}; the packing counted wrongly"
            )


def completed(sums: dict[str, float], maxima: dict[str, float]) -> dict[str, float]:
    """Metrics of a whole mini-batch from its reduced stats. Extremes are 0 if there is no trainable token."""
    metrics = {name: value for name, value in sums.items() if name not in ("tokens", "sequences", "groups")}
    mean, square = metrics.pop("weight"), metrics.pop("weight_squared")
    if (lags := metrics.pop("lags", None)) is not None:
        metrics["off_policy/lag_mean"] /= max(lags, 1)
    metrics["policy/ess"] = mean**2 / square if square > 0 else 0.0
    for name, value in maxima.items():
        metrics[name] = value if value != -float("inf") else 0.0
    metrics["policy/ratio_min"] = -metrics.pop("minus_ratio_min")
    return metrics
