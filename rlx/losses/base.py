"""What an objective is, and how per-token losses become the one number that is minimised.

An objective is one function `f(tokens: TokenBatch, **its own keys) -> TokenLoss` of per-token tensors of the *trainable* tokens of one
micro-batch: no masks, no padding, no model. To add one: a file with such a function and a YAML whose `_target_` is its dotted name.
Normalisers belong to the global batch (all ranks, all micro-batches), so gradients do not depend on how samples were packed.

Knows nothing of models, packing or processes. Shapes: N trainable tokens, R rollouts of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from rlx.config.schema import LossTerms

MAX_LOG_RATIO = 20.0  # log-ratios are clamped to ± this before exp: e^20 is finite in every dtype

AGGREGATES = ("token_mean", "seq_mean", "seq_sum", "fixed_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """The trainable tokens of one micro-batch. All tokens of one rollout are in it."""

    logp: Tensor  # [N] under the policy being trained, at the sampling temperature, with gradient
    old_logp: Tensor  # [N] under the proximal policy π_old
    inference_logp: Tensor  # [N] as the inference engine reported it when it sampled the token
    entropy: Tensor  # [N] of the full softmax, nats, with gradient
    advantages: Tensor  # [N]
    rollout_ids: Tensor  # [N] int64, 0 … R-1
    rollout_lengths: Tensor  # [R] trainable tokens of each rollout, ≥ 0

    def rollout_sum(self, values: Tensor) -> Tensor:
        """[N] → [R] sum over the tokens of each rollout."""
        return values.new_zeros(len(self.rollout_lengths)).index_add(0, self.rollout_ids, values)

    def rollout_mean(self, values: Tensor) -> Tensor:
        """[N] → [R] mean over the tokens of each rollout; 0 for a rollout without tokens."""
        return self.rollout_sum(values) / self.rollout_lengths.clamp(min=1)

    def ratio(self) -> Tensor:
        """[N] ρ_t = exp(logp_t − old_t), with gradient, the log clamped to ±20."""
        return safe_exp(self.logp - self.old_logp)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """What an objective returns. Clip marks are for the metrics only."""

    loss: Tensor  # [N] to be minimised, before aggregation; exactly 0 where `dropped`
    clipped_low: Tensor | None = None  # bool, [N] (or [R] with unit "sequence"): held at the lower bound, so without gradient
    clipped_high: Tensor | None = None  # bool, likewise at the upper bound
    dropped: Tensor | None = None  # bool, [N]: the objective left the token out
    unit: Literal["token", "sequence"] = "token"  # what the clip marks count


@dataclass(slots=True)
class Stats:
    """Diagnostics that add up over micro-batches and ranks: sums, and largest values. All zero-dimensional tensors."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def add(self, other: Stats) -> None:
        for name, value in other.sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        for name, value in other.maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value


def safe_exp(log_ratio: Tensor) -> Tensor:
    """exp with the argument clamped to ±20. Outside the clamp the gradient is 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


class Objective:
    """A per-token loss with its aggregation, shared terms and diagnostics."""

    def __init__(self, function: Callable[[TokenBatch], TokenLoss], terms: LossTerms, *, max_length: int | None = None) -> None:
        """`function` has its own keys bound already; `max_length` is L_max where `terms.max_length` is null.

        Raises ValueError for an unknown aggregate, or `fixed_length` without a length.
        """
        if terms.aggregate not in AGGREGATES:
            raise ValueError(f"loss.aggregate is `{terms.aggregate}`; it must be one of {', '.join(AGGREGATES)}")
        self.function, self.terms = function, terms
        self.max_length = terms.max_length or max_length
        if terms.aggregate == "fixed_length" and not self.max_length:
            raise ValueError("loss.aggregate=fixed_length divides by loss.max_length, which is null; set it, or sampling.max_tokens")

    def __call__(self, tokens: TokenBatch, num_loss_tokens: int, num_sequences: int) -> tuple[Tensor, Stats]:
        """This micro-batch's share of the global loss (a scalar; shares add up), and its diagnostics.

        `num_loss_tokens` is N_tok and `num_sequences` N_seq of the global batch.
        """
        result = self.function(tokens)
        assert result.loss.shape == tokens.logp.shape, (result.loss.shape, tokens.logp.shape)
        policy = self.aggregate(result.loss, tokens, num_loss_tokens, num_sequences)
        total = policy
        entropy_term = policy.detach().new_zeros(())
        if self.terms.entropy_coef != 0:
            entropy_term = self.aggregate(-self.terms.entropy_coef * tokens.entropy, tokens, num_loss_tokens, num_sequences)
            total = policy + entropy_term
        stats = _diagnostics(tokens, result, num_loss_tokens, num_sequences)
        stats.sums["loss/policy"] = policy.detach().double()
        stats.sums["loss/entropy"] = entropy_term.detach().double()
        stats.sums["loss/kl"] = torch.zeros_like(stats.sums["loss/policy"])  # no reference model, so no KL term
        stats.sums["loss/total"] = total.detach().double()
        return total, stats

    def aggregate(self, loss: Tensor, tokens: TokenBatch, num_loss_tokens: int, num_sequences: int) -> Tensor:
        """[N] → scalar: Σ ℓ_t · w_t with the weights that `loss.aggregate` names (OBJECTIVES.md, aggregation over tokens)."""
        sequences = max(num_sequences, 1)
        if self.terms.aggregate == "token_mean":
            return loss.sum() / max(num_loss_tokens, 1)
        if self.terms.aggregate == "seq_mean":
            return tokens.rollout_mean(loss).sum() / sequences
        if self.terms.aggregate == "seq_sum":
            return loss.sum() / sequences
        assert self.max_length is not None
        return loss.sum() / (sequences * self.max_length)


@torch.no_grad()
def _diagnostics(tokens: TokenBatch, result: TokenLoss, num_loss_tokens: int, num_sequences: int) -> Stats:
    """The diagnostics that every objective has. Means are shares of the global batch already; `policy/ess` is completed by `finish`."""
    per_token = 1.0 / max(num_loss_tokens, 1)
    per_unit = per_token if result.unit == "token" else 1.0 / max(num_sequences, 1)
    ratio = tokens.ratio().double()
    difference = (tokens.logp - tokens.inference_logp).double()
    log_ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3 = log_ratio.expm1() - log_ratio  # of KL(inference ‖ trainer): the tokens were sampled by inference
    zero = ratio.new_zeros(())

    def count(mask: Tensor | None) -> Tensor:
        return zero if mask is None else mask.sum().double()

    stats = Stats(
        sums={
            "policy/entropy": tokens.entropy.double().sum() * per_token,
            "policy/clip_frac_low": count(result.clipped_low) * per_unit,
            "policy/clip_frac_high": count(result.clipped_high) * per_unit,
            "policy/masked_frac": count(result.dropped) * per_token,
            "policy/ratio_mean": ratio.sum() * per_token,
            "ratio_squared": ratio.square().sum() * per_token,
            "mismatch/kl": k3.sum() * per_token,
            "mismatch/abs_logp_diff_mean": difference.abs().sum() * per_token,
        }
    )
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


def finish(sums: dict[str, float], maxima: dict[str, float]) -> dict[str, float]:
    """Metrics of a whole mini-batch from its reduced stats; without a trainable token, extremes are 0."""
    metrics = dict(sums)
    square = metrics.pop("ratio_squared")
    metrics["policy/ess"] = metrics["policy/ratio_mean"] ** 2 / square if square > 0 else 0.0
    for name, value in maxima.items():
        metrics[name] = value if value != -float("inf") else 0.0
    metrics["policy/ratio_min"] = -metrics.pop("minus_ratio_min")
    return metrics
