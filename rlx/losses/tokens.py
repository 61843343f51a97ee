"""What an objective sees and what it returns: per-token tensors of the trainable tokens of one micro-batch.

Knows nothing of aggregation, models, packing or processes. Shapes: N trainable tokens, R rollouts of the micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # log-ratios are clamped to ± this before exp: e^20 is finite in every dtype


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
    ref_logp: Tensor | None = None  # [N] under the reference model (or teacher), without gradient; None without one
    on_policy: Tensor | None = None  # bool [R]: every token was sampled by exactly the policy being trained; None: nobody knows

    def rollout_sum(self, values: Tensor) -> Tensor:
        """[N] → [R] sum over the tokens of each rollout."""
        return values.new_zeros(len(self.rollout_lengths)).index_add(0, self.rollout_ids, values)

    def rollout_mean(self, values: Tensor) -> Tensor:
        """[N] → [R] mean over the tokens of each rollout; 0 for a rollout without tokens."""
        return self.rollout_sum(values) / self.rollout_lengths.clamp(min=1)

    def ratio(self) -> Tensor:
        """[N] ρ_t = exp(logp_t − old_t), with gradient, the log clamped to ±20."""
        return safe_exp(self.logp - self.old_logp)

    def in_float32(self) -> TokenBatch:
        """The same with every 16-bit tensor widened: means of many tokens and bounds of a thousandth do not survive 8 bits of mantissa."""
        values = {name: getattr(self, name) for name in self.__slots__}
        narrow = (torch.bfloat16, torch.float16)
        return TokenBatch(**{k: v.float() if isinstance(v, Tensor) and v.dtype in narrow else v for k, v in values.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """What an objective returns. Weights and clip marks are for the metrics only."""

    loss: Tensor  # [N] to be minimised, before aggregation; exactly 0 where `dropped`
    penalty: Tensor | None = None  # [N] added to it after correction and dual clip, also where `dropped`
    weight: Tensor | None = None  # [N] what multiplies A_t ∇log π_t, 0 where nothing does (clipped, dropped); None: the ratio ρ_t
    clipped_low: Tensor | None = None  # bool, [N] (or [R] with unit "sequence"): held at the lower bound, so without gradient
    clipped_high: Tensor | None = None  # bool, likewise at the upper bound
    dropped: Tensor | None = None  # bool, [N]: the objective left the token out
    unit: Literal["token", "sequence"] = "token"  # what the clip marks count


def safe_exp(log_ratio: Tensor) -> Tensor:
    """exp with the argument clamped to ±20. Outside the clamp the gradient is 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
