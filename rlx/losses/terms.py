"""What any objective can have added: a KL term against a reference, a correction for what separates trainer and engine, a dual clip.

Pure functions of per-token tensors, beside the controller that moves β. Knows no configuration and no objective.
Shapes: N trainable tokens, R rollouts of the micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlx.losses.tokens import MAX_LOG_RATIO, TokenBatch, safe_exp


def kl_estimate(name: str, logp: Tensor, ref_logp: Tensor) -> Tensor:
    """[N] estimate of KL(policy ‖ reference) on tokens that the policy sampled, with gradient for `logp` (Schulman, "Approximating KL").

    With d = ref_logp − logp: `k1` = −d, `k2` = d²/2, `k3` = exp(d) − 1 − d, there with d at most 20, beyond which it is constant.
    As a term of the loss, k1 has no gradient in expectation and k3 a biased one; that of k2 is right on-policy (arXiv 2512.21852).
    """
    d = ref_logp - logp
    if name == "k1":
        return -d
    if name == "k2":
        return d.square() / 2
    assert name == "k3", name
    d = d.clamp(max=MAX_LOG_RATIO)  # for both terms: beyond it −d alone would push the policy away; towards −∞ exp needs no clamp
    return d.expm1() - d


class KlController:
    """β of the KL term: constant, or moved so that the measured KL comes to a target (arXiv 1909.08593 §2.2)."""

    def __init__(self, beta: float, target: float | None, gain: float) -> None:
        """`target` in nats per token, null: β stays; `gain` is the paper's K."""
        self.beta, self.target, self.gain = beta, target, gain

    def update(self, kl: float) -> None:
        """After an optimizer step with this mean KL, nats per token: β ← β · (1 + K · clip(KL/target − 1, −0.2, 0.2))."""
        if self.target is not None:
            self.beta *= 1 + self.gain * min(max(kl / self.target - 1, -0.2), 0.2)


def correction(tokens: TokenBatch, kind: str, cap: float, unit: str) -> tuple[Tensor | None, Tensor | None]:
    """(weights, bool what is left out) of the mismatch r_t = exp(old_t − inf_t), for `loss.proximal=recompute`; None where nothing is done.

    [N] for losses by token, [R] for losses by `unit` "sequence". `tis` weighs with sg[min(r_t, cap)] (truncated importance sampling);
    `mis` leaves out tokens with r_t outside [1/cap, cap]; `seq_tis` and `seq_mis` do so with the product of r_t over the rollout, for all
    of its tokens. Raises ValueError for a kind by token where losses are by sequence: there is no token to weigh or to leave out.
    """
    if kind == "none":
        return None, None
    difference = (tokens.old_logp - tokens.inference_logp).detach()
    if kind.startswith("seq_"):
        ratio = safe_exp(tokens.rollout_sum(difference))
        ratio = ratio if unit == "sequence" else ratio[tokens.rollout_ids]
    elif unit == "sequence":
        raise ValueError(f"loss.correction is {kind}, which goes by token, and all tokens carry their sequence's loss; set seq_{kind}")
    else:
        ratio = safe_exp(difference)
    if kind.endswith("tis"):
        return ratio.clamp(max=cap), None
    assert kind.endswith("mis"), kind
    return None, (ratio < 1 / cap) | (ratio > cap)


def dual_clipped(loss: Tensor, advantages: Tensor, bound: float) -> Tensor:
    """[N] (or [R]) loss, held below −bound · A_t where A_t < 0 (dual-clip PPO, arXiv 1912.09729 eq. 5).

    There it reads max(·, bound · A), because there the surrogate is maximised. It acts on objectives whose loss is −ratio · A;
    those that weigh log-probabilities never come near the bound.
    """
    return torch.where(dual_clip_holds(loss, advantages, bound), -bound * advantages, loss)


def dual_clip_holds(loss: Tensor, advantages: Tensor, bound: float) -> Tensor:
    """bool, shaped alike: where the dual clip holds the loss, which has no gradient there."""
    return (advantages < 0) & (loss > -bound * advantages)
