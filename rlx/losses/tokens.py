"""The input and output of an objective: per-token tensors of the trainable tokens of one micro-batch.

Everything is float64. That costs little, N numbers beside N × V logits, and a float32 sum over a rollout of 50,000 tokens errs by 1e-3.
Shapes: N trainable tokens, R rollouts of the micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

PER_TOKEN = (
    "logp", "old_logp", "inference_logp", "entropy", "advantages", "rollout_ids", "ref_logp", "teacher_logp", "sampled", "policy_weights",
    "ce_weights", "ref_kl_weights",
)  # fmt: skip
"""The fields of a `TokenBatch` with one value per token."""

MAX_LOG_RATIO = 20.0  # log-ratios are clamped to ± this before exp: e^20 is finite in every dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """The trainable tokens of one micro-batch. A rollout is split over micro-batches only for objectives that are `token_local`."""

    logp: Tensor  # [N] under the policy being trained, at the sampling temperature, with gradient
    old_logp: Tensor  # [N] under the proximal policy π_old
    inference_logp: Tensor  # [N] as the inference engine reported it when it sampled the token
    entropy: Tensor  # [N] of the full softmax, nats, with gradient
    advantages: Tensor  # [N]
    rollout_ids: Tensor  # [N] int64, 0 … R-1
    rollout_lengths: Tensor  # [R] trainable tokens of each rollout here, ≥ 0
    tokens_elsewhere: Tensor | None = None  # [R] its trainable tokens in other micro-batches; None: none
    ref_logp: Tensor | None = None  # [N] under the reference model (or teacher), without gradient; None: there is no such model
    group_lengths: Tensor | None = None  # [R] trainable tokens of each rollout's group in the global batch; None: unknown
    on_policy: Tensor | None = None  # bool [R]: the policy being trained sampled every token; None: unknown
    teacher_logp: Tensor | None = None  # [N] that came with the samples; NaN where a token was not scored; None: there are none
    sampled: Tensor | None = None  # bool [N]: the policy sampled the token; None: all. The others are for cross-entropy only
    policy_weights: Tensor | None = None  # [N] streams of the samples (`rlx.types.STREAMS`); None: the default for every token
    ce_weights: Tensor | None = None  # [N]
    ref_kl_weights: Tensor | None = None  # [N]
    objectives: Tensor | None = None  # int64 [R] number of each rollout's objective; None: there is one

    @property
    def whole_lengths(self) -> Tensor:
        """[R] trainable tokens of each rollout, those in other micro-batches included."""
        return self.rollout_lengths if self.tokens_elsewhere is None else self.rollout_lengths + self.tokens_elsewhere

    def rollout_sum(self, values: Tensor) -> Tensor:
        """[N] → [R] float64, sum over the tokens of each rollout."""
        zeros = values.new_zeros(len(self.rollout_lengths), dtype=torch.float64)
        return zeros.index_add(0, self.rollout_ids, values.double())

    def rollout_mean(self, values: Tensor) -> Tensor:
        """[N] → [R] float64, mean over the tokens of each rollout; 0 without tokens. Of a split one: its share of the mean."""
        return self.rollout_sum(values) / self.whole_lengths.clamp(min=1)

    def pick(self, chosen: Tensor | None) -> TokenBatch:
        """The tokens where `chosen` (bool [N]; None: all) is True. It has the same rollouts, some perhaps without tokens now.

        `group_lengths` stays: it counts the tokens of the objectives' own losses.
        """
        if chosen is None:
            return self
        rollout_ids = self.rollout_ids[chosen]
        values = {name: getattr(self, name) for name in PER_TOKEN}
        picked: dict[str, Any] = {name: None if value is None else value[chosen] for name, value in values.items()}
        lengths = torch.zeros_like(self.rollout_lengths).index_add(
            0, rollout_ids, torch.ones_like(rollout_ids, dtype=self.rollout_lengths.dtype)
        )
        return replace(self, **picked, rollout_lengths=lengths)

    def ratio(self) -> Tensor:
        """[N] ρ_t = exp(logp_t − old_t), with gradient, the log clamped to ±20."""
        return safe_exp(self.logp - self.old_logp)

    def in_float64(self) -> TokenBatch:
        """A copy with every floating-point tensor as float64. Gradients arrive in the original dtypes."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return TokenBatch(**{k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in values.items()})

    def check(self, num_loss_tokens: int, num_sequences: int) -> None:
        """Raise ValueError if shapes, ids and lengths disagree, or exceed the counts of the global batch."""
        n, r = len(self.logp), len(self.rollout_lengths)
        for name in PER_TOKEN[1:]:
            value = getattr(self, name)
            if value is not None and value.shape != self.logp.shape:
                raise ValueError(
                    f"{name} has shape {list(value.shape)}, but logp has {list(self.logp.shape)}; both need one value per trainable token"
                )
        for name in ("on_policy", "group_lengths", "objectives", "tokens_elsewhere"):
            value = getattr(self, name)
            if value is not None and value.shape != self.rollout_lengths.shape:
                raise ValueError(f"{name} has shape {list(value.shape)}, but rollout_lengths has [{r}]; both need one value per rollout")
        ids, lengths = self.rollout_ids.cpu(), self.rollout_lengths.tolist()
        if n and not 0 <= (lowest := int(ids.min())) <= (highest := int(ids.max())) < r:
            raise ValueError(f"rollout_ids range from {lowest} to {highest}, but rollout_lengths has {r} rollouts, 0 to {r - 1}")
        for rollout, (counted, named) in enumerate(zip(torch.bincount(ids, minlength=r).tolist(), lengths, strict=True)):
            if counted != named:
                raise ValueError(f"rollout_ids has {counted} tokens of rollout {rollout}, but rollout_lengths says {named}")
        if n > num_loss_tokens:
            raise ValueError(f"this micro-batch has {n} trainable tokens, but the global batch is said to have {num_loss_tokens}")
        parts = [0] * r if self.tokens_elsewhere is None else self.tokens_elsewhere.tolist()  # two parts of a rollout may be in one row
        if (here := sum(bool(length) and not part for length, part in zip(lengths, parts, strict=True))) > num_sequences:
            raise ValueError(
                f"this micro-batch has {here} rollouts with trainable tokens, but the global batch is said to have {num_sequences}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """The output of an objective. Weights and clip masks only feed metrics.

    With unit "sequence", every field except `penalty` is [R]. Each token then carries its rollout's value in the aggregation.
    """

    loss: Tensor  # [N] before aggregation; exactly 0 where `dropped`
    penalty: Tensor | None = None  # [N] added to the loss after correction and dual clip, also where `dropped`
    weight: Tensor | None = None  # [N] the factor of A_t ∇log π_t, 0 for tokens without gradient (clipped, dropped); None: the ratio ρ_t
    clipped_low: Tensor | None = None  # bool [N]: held at the lower bound, so without gradient
    clipped_high: Tensor | None = None  # bool [N]: held at the upper bound, so without gradient
    dropped: Tensor | None = None  # bool [N]: the objective left the token out
    unit: Literal["token", "sequence"] = "token"  # whether values are per token or per sequence


def safe_exp(log_ratio: Tensor) -> Tensor:
    """exp with the argument clamped to ±20. Outside the clamp the gradient is 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def ratio_weight(log_ratio: Tensor) -> Tensor:
    """The factor in the gradient of `safe_exp(log_ratio)`: its value inside the clamp, 0 outside. Without gradient itself."""
    ratio = safe_exp(log_ratio.detach())
    return torch.where(log_ratio.detach().abs() <= MAX_LOG_RATIO, ratio, torch.zeros_like(ratio))
