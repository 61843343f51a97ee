"""Terms shared by all objectives: a KL term to a reference, a correction of the trainer-engine mismatch, a dual clip.

Pure functions of per-token tensors, and the controller that moves β.
Shapes: N trainable tokens, R rollouts of the micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlx.losses.tokens import MAX_LOG_RATIO, TokenBatch, safe_exp


def kl_estimate(name: str, logp: Tensor, ref_logp: Tensor) -> Tensor:
    """[N] estimate of KL(policy ‖ reference) on tokens sampled by the policy, with gradient for `logp` (Schulman, "Approximating KL").

    With d = ref_logp − logp: `k1` = −d, `k2` = d²/2, `k3` = exp(d) − 1 − d. For k3, d is clamped to at most 20.
    As a loss term, k1 has no gradient in expectation, k3 a biased one, and k2 the right one on-policy (arXiv 2512.21852).
    """
    d = ref_logp - logp
    if name == "k1":
        return -d
    if name == "k2":
        return d.square() / 2
    assert name == "k3", name
    d = d.clamp(max=MAX_LOG_RATIO)  # in both terms: else −d alone would push the policy away beyond it. Towards −∞ exp needs no clamp
    return d.expm1() - d


class KlController:
    """β of the KL term: constant, or adapted to bring the measured KL to a target (arXiv 1909.08593 §2.2)."""

    def __init__(self, beta: float, target: float | None, gain: float) -> None:
        """`target` is in nats per token; with None, β stays constant. `gain` is the paper's K."""
        self.beta, self.target, self.gain = beta, target, gain

    def update(self, kl: float) -> None:
        """After an optimizer step with this mean KL, nats per token: β ← β · (1 + K · clip(KL/target − 1, −0.2, 0.2))."""
        if self.target is not None:
            self.beta *= 1 + self.gain * min(max(kl / self.target - 1, -0.2), 0.2)


def correction(tokens: TokenBatch, kind: str, cap: float, unit: str) -> tuple[Tensor | None, Tensor | None]:
    """(weights, bool mask of dropped values) for the mismatch r_t = exp(old_t − inf_t), with `loss.proximal=recompute`; None: no effect.

    Both are [N], or [R] if `unit` is "sequence". `tis` (truncated importance sampling) weighs with sg[min(r_t, cap)]. `mis` drops tokens
    with r_t outside [1/cap, cap]. `seq_tis` and `seq_mis` do the same to whole rollouts, with the product of r_t over the rollout.
    Raises ValueError for a correction by token if losses are by sequence.
    """
    if kind == "none":
        return None, None
    difference = (tokens.old_logp - tokens.inference_logp).detach()
    if kind.startswith("seq_"):
        ratio = safe_exp(tokens.rollout_sum(difference))
        ratio = ratio if unit == "sequence" else ratio[tokens.rollout_ids]
    elif unit == "sequence":
        raise ValueError(f"loss.correction is {kind}, which works by token, but this loss works by sequence; set seq_{kind}")
    else:
        ratio = safe_exp(difference)
    if kind.endswith("tis"):
        return ratio.clamp(max=cap), None
    assert kind.endswith("mis"), kind
    return None, (ratio < 1 / cap) | (ratio > cap)


def dual_clipped(loss: Tensor, advantages: Tensor, bound: float) -> Tensor:
    """[N] (or [R]) loss, held to at most −bound · A_t where A_t < 0 (dual-clip PPO, arXiv 1912.09729 eq. 5).

    The paper maximises and so writes max(·, bound · A). The bound acts on objectives whose loss is −ratio · A.
    Objectives that weigh log-probabilities never reach it.
    """
    return torch.where(dual_clip_holds(loss, advantages, bound), -bound * advantages, loss)


def dual_clip_holds(loss: Tensor, advantages: Tensor, bound: float) -> Tensor:
    """bool, same shape: where the dual clip holds the loss. The loss has no gradient there."""
    return (advantages < 0) & (loss > -bound * advantages)
