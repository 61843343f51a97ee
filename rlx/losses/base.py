"""Objectives: per-token or per-sequence losses, their aggregation to one scalar, and the shared terms.

An objective is one function `f(tokens: TokenBatch, **its own keys) -> TokenLoss`. It sees per-token tensors of the *trainable* tokens of
one micro-batch: no masks, no padding, no model. To add one, write such a function and a YAML whose `_target_` is its dotted name
(`docs/objectives.md`). Losses are divided by counts of the global batch (all ranks, all micro-batches), so packing changes no gradient.

Shapes: N trainable tokens, R rollouts of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from rlx.config.schema import LossTerms
from rlx.losses.diagnostics import Stats, diagnostics
from rlx.losses.terms import KlController, correction, dual_clip_holds, dual_clipped, kl_estimate
from rlx.losses.tokens import TokenBatch, TokenLoss, ratio_weight

AGGREGATES = ("token_mean", "seq_mean", "seq_sum", "fixed_length", "group_token_mean")


class Objective:
    """A per-token loss with its aggregation, shared terms and diagnostics."""

    def __init__(self, function: Callable[[TokenBatch], TokenLoss], terms: LossTerms, *, max_length: int | None = None) -> None:
        """The keys of `function` are already bound. `max_length` is L_max if `terms.max_length` is None.

        Raises ValueError for an unknown aggregate, or `fixed_length` without a length.
        """
        if terms.aggregate not in AGGREGATES:
            raise ValueError(f"loss.aggregate is `{terms.aggregate}`; it must be one of {', '.join(AGGREGATES)}")
        self.function, self.terms = function, terms
        self.streams: frozenset[str] = frozenset()  # the optional per-token streams (`rlx.types.STREAMS`) that the function reads
        self.max_length = terms.max_length or max_length
        if terms.aggregate == "fixed_length" and not self.max_length:
            raise ValueError("loss.aggregate=fixed_length divides by loss.max_length, which is null; set it, or sampling.max_tokens")
        self.controller = KlController(terms.kl.beta, terms.kl.target_kl, terms.kl.gain)

    def __call__(self, tokens: TokenBatch, num_loss_tokens: int, num_sequences: int, num_groups: int | None = None) -> tuple[Tensor, Stats]:
        """This micro-batch's share of the global loss (a scalar; shares add up), and its diagnostics.

        `num_loss_tokens` (N_tok), `num_sequences` (N_seq) and `num_groups` are counts of the global batch. `num_groups` counts the groups
        with trainable tokens; only `group_token_mean` needs it. Raises ValueError for a KL term without a reference, for shapes, ids,
        lengths or counts that disagree, and for a correction by token of a loss by sequence.
        """
        tokens.check(num_loss_tokens, num_sequences)
        tokens = tokens.in_float64()
        result = self._policy_loss(tokens)

        def share(per_token: Tensor) -> Tensor:
            return self.aggregate(tokens.rollout_sum(per_token), tokens, num_loss_tokens, num_sequences, num_groups)

        if result.unit == "sequence":
            sums = result.loss * tokens.rollout_lengths
            parts = {"policy": self.aggregate(sums, tokens, num_loss_tokens, num_sequences, num_groups)}
        else:
            parts = {"policy": share(result.loss)}
        if result.penalty is not None:
            parts["policy"] = parts["policy"] + share(result.penalty)
        if self.terms.entropy_coef != 0:
            parts["entropy"] = share(-self.terms.entropy_coef * tokens.entropy)
        if self.controller.beta != 0:
            if tokens.ref_logp is None:
                raise ValueError(f"loss.kl.beta is {self.controller.beta}, but there is no reference model to compare with")
            parts["kl"] = share(self.controller.beta * kl_estimate(self.terms.kl.estimator, tokens.logp, tokens.ref_logp))
        total = torch.stack(list(parts.values())).sum()
        stats = diagnostics(tokens, result, num_loss_tokens, num_sequences)
        for name in ("policy", "kl", "entropy"):
            stats.sums[f"loss/{name}"] = parts[name].detach() if name in parts else torch.zeros_like(total)
        stats.sums["loss/total"] = total.detach()
        return total, stats

    def _policy_loss(self, tokens: TokenBatch) -> TokenLoss:
        """The objective's own loss, after dual clip and correction."""
        result = self.function(tokens)
        sequence = result.unit == "sequence"
        expected = tokens.rollout_lengths.shape if sequence else tokens.logp.shape
        assert result.loss.shape == expected, (result.unit, result.loss.shape, expected)
        loss, dropped, weight = result.loss, result.dropped, result.weight
        if weight is None:
            log_ratio = tokens.logp - tokens.old_logp
            weight = ratio_weight(tokens.rollout_mean(log_ratio) if sequence else log_ratio)
        weight = weight.detach()
        if self.terms.dual_clip is not None:
            advantages = tokens.rollout_mean(tokens.advantages) if sequence else tokens.advantages
            weight = torch.where(dual_clip_holds(loss, advantages, self.terms.dual_clip), torch.zeros_like(weight), weight)
            loss = dual_clipped(loss, advantages, self.terms.dual_clip)
        factor, more = correction(tokens, self.terms.correction, self.terms.correction_cap, result.unit)
        if factor is not None:
            loss, weight = loss * factor, weight * factor
        if more is not None:
            loss, weight = (torch.where(more, torch.zeros_like(x), x) for x in (loss, weight))
            dropped = more if dropped is None else dropped | more
        return replace(result, loss=loss, weight=weight, dropped=dropped)

    def after_update(self, metrics: dict[str, float], *, changed: bool = True) -> None:
        """Report an optimizer step's measured KL to the controller, on every rank alike. β stays if the step `changed` nothing."""
        if "ref/kl" in metrics:
            metrics["ref/beta"] = self.controller.beta
            if changed:
                self.controller.update(metrics["ref/kl"])

    def state_dict(self) -> dict[str, float]:
        """The state that changes during training."""
        return {"beta": self.controller.beta}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.controller.beta = state["beta"]

    def aggregate(
        self, sums: Tensor, tokens: TokenBatch, num_loss_tokens: int, num_sequences: int, num_groups: int | None = None
    ) -> Tensor:
        """[R] sums of ℓ_t over each rollout's tokens → scalar, by `loss.aggregate` (docs/objectives.md).

        Every aggregate weighs the tokens of one rollout alike. Raises ValueError for `group_token_mean` if the groups are unknown.
        """
        sequences = max(num_sequences, 1)
        if self.terms.aggregate == "token_mean":
            return sums.sum() / max(num_loss_tokens, 1)
        if self.terms.aggregate == "seq_mean":
            return (sums / tokens.rollout_lengths.clamp(min=1)).sum() / sequences
        if self.terms.aggregate == "seq_sum":
            return sums.sum() / sequences
        if self.terms.aggregate == "group_token_mean":
            if tokens.group_lengths is None or num_groups is None:
                raise ValueError("loss.aggregate is group_token_mean, but these tokens do not say which prompt's group they belong to")
            return (sums / tokens.group_lengths.clamp(min=1)).sum() / max(num_groups, 1)
        assert self.max_length is not None
        return sums.sum() / (sequences * self.max_length)
