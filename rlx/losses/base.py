"""How per-token losses become the one number that is minimised: an objective with its aggregation and the terms it may have added.

An objective is one function `f(tokens: TokenBatch, **its own keys) -> TokenLoss` of per-token tensors of the *trainable* tokens of one
micro-batch: no masks, no padding, no model. To add one: a file with such a function and a YAML whose `_target_` is its dotted name
(`docs/objectives.md`). Normalisers belong to the global batch (all ranks, all micro-batches), so gradients do not depend on packing.

Knows nothing of models, packing or processes. Shapes: N trainable tokens, R rollouts of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from rlx.config.schema import LossTerms
from rlx.losses.diagnostics import Stats, diagnostics
from rlx.losses.terms import KlController, corrected, dual_clip_holds, dual_clipped, kl_estimate
from rlx.losses.tokens import TokenBatch, TokenLoss

AGGREGATES = ("token_mean", "seq_mean", "seq_sum", "fixed_length")


class Objective:
    """A per-token loss with its aggregation, shared terms and diagnostics."""

    def __init__(self, function: Callable[[TokenBatch], TokenLoss], terms: LossTerms, *, max_length: int | None = None) -> None:
        """`function` has its own keys bound already; `max_length` is L_max where `terms.max_length` is null.

        Raises ValueError for an unknown aggregate, or `fixed_length` without a length.
        """
        if terms.aggregate not in AGGREGATES:
            raise ValueError(f"loss.aggregate is `{terms.aggregate}`; it must be one of {', '.join(AGGREGATES)}")
        self.function, self.terms = function, terms
        self.streams: frozenset[str] = frozenset()  # the optional per-token streams (`rlx.types.STREAMS`) that it consumes
        self.max_length = terms.max_length or max_length
        if terms.aggregate == "fixed_length" and not self.max_length:
            raise ValueError("loss.aggregate=fixed_length divides by loss.max_length, which is null; set it, or sampling.max_tokens")
        self.controller = KlController(terms.kl.beta, terms.kl.target_kl, terms.kl.gain)

    def __call__(self, tokens: TokenBatch, num_loss_tokens: int, num_sequences: int) -> tuple[Tensor, Stats]:
        """This micro-batch's share of the global loss (a scalar; shares add up), and its diagnostics.

        `num_loss_tokens` is N_tok and `num_sequences` N_seq of the global batch. Raises ValueError for a KL term without a reference.
        """
        tokens = tokens.in_float32()
        result = self._policy_loss(tokens)

        def share(loss: Tensor) -> Tensor:
            return self.aggregate(loss, tokens, num_loss_tokens, num_sequences)

        parts = {"policy": share(result.loss)}
        if self.terms.entropy_coef != 0:
            parts["entropy"] = share(-self.terms.entropy_coef * tokens.entropy)
        if self.controller.beta != 0:
            if tokens.ref_logp is None:
                raise ValueError(f"loss.kl.beta is {self.controller.beta} and there is no reference model to compare with")
            parts["kl"] = share(self.controller.beta * kl_estimate(self.terms.kl.estimator, tokens.logp, tokens.ref_logp))
        total = sum(parts.values(), tokens.logp.new_zeros(()))
        stats = diagnostics(tokens, result, num_loss_tokens, num_sequences)
        for name in ("policy", "kl", "entropy"):
            stats.sums[f"loss/{name}"] = parts[name].detach().double() if name in parts else torch.zeros_like(stats.sums["mismatch/kl"])
        stats.sums["loss/total"] = total.detach().double()
        return total, stats

    def _policy_loss(self, tokens: TokenBatch) -> TokenLoss:
        """The objective's own loss with dual clip and correction, then its penalty."""
        result = self.function(tokens)
        assert result.loss.shape == tokens.logp.shape, (result.loss.shape, tokens.logp.shape)
        loss, dropped = result.loss, result.dropped
        weight = (tokens.ratio() if result.weight is None else result.weight).detach()
        if self.terms.dual_clip is not None:
            weight = torch.where(dual_clip_holds(loss, tokens.advantages, self.terms.dual_clip), torch.zeros_like(weight), weight)
            loss = dual_clipped(loss, tokens.advantages, self.terms.dual_clip)
        loss, more = corrected(loss, tokens, self.terms.correction, self.terms.correction_cap)
        weight, _ = corrected(weight, tokens, self.terms.correction, self.terms.correction_cap)
        if more is not None:
            dropped = more if dropped is None else dropped | more
        if result.penalty is not None:
            loss = loss + result.penalty
        return replace(result, loss=loss, weight=weight, dropped=dropped)

    def after_update(self, metrics: dict[str, float], *, changed: bool = True) -> None:
        """Tell the KL controller what an optimizer step measured, unless nothing was `changed`; the same on every rank."""
        if "ref/kl" in metrics:
            metrics["ref/beta"] = self.controller.beta
            if changed:
                self.controller.update(metrics["ref/kl"])

    def state_dict(self) -> dict[str, float]:
        """What changes while training."""
        return {"beta": self.controller.beta}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.controller.beta = state["beta"]

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
