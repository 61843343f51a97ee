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

from rlx.config.loss_traits import declared_in
from rlx.config.schema import LossTerms
from rlx.losses.diagnostics import Stats, diagnostics
from rlx.losses.terms import KlController, correction, dual_clip_holds, dual_clipped, kl_estimate
from rlx.losses.tokens import TokenBatch, TokenLoss, ratio_weight
from rlx.types import Count, LossCounts

UNKNOWN = -1  # number of groups
AGGREGATES = ("token_mean", "seq_mean", "seq_sum", "fixed_length", "group_token_mean")


def streams_of(kind: str, terms: LossTerms) -> frozenset[str]:
    """The optional streams of samples (`rlx.types.STREAMS`) that an objective of this kind with these terms reads."""
    names = {"ref_kl_weights", "teacher_logprobs"} if kind == "ref_kl" else {"policy_weights"}
    if terms.kl.beta:
        names.add("ref_kl_weights")
    if terms.ce_coef:
        names.add("ce_weights")
    return frozenset(names)


def _and(sampled: Tensor | None, weights: Tensor | None) -> Tensor | None:
    """bool [N] where a token was sampled and has a weight; None: everywhere."""
    if weights is None:
        return sampled
    return weights != 0 if sampled is None else sampled & (weights != 0)


class Objective:
    """A per-token loss with its aggregation, shared terms and diagnostics."""

    def __init__(
        self,
        function: Callable[[TokenBatch], TokenLoss],
        terms: LossTerms,
        *,
        max_length: int | None = None,
        label: str | None = None,
        reference_teaches: bool = False,
    ) -> None:
        """The keys of `function` are already bound. `max_length` is L_max if `terms.max_length` is None.

        `label`: its name in the metrics of a run with several objectives.
        `reference_teaches`: the teacher of an objective that distils is the reference model. In a batch with samples that bring a teacher's
        numbers for another objective, its own tokens have NaN there.

        Raises ValueError for an unknown aggregate, or `fixed_length` without a length.
        """
        if terms.aggregate not in AGGREGATES:
            raise ValueError(f"loss.aggregate is `{terms.aggregate}`; it must be one of {', '.join(AGGREGATES)}")
        self.function, self.terms, self.label = function, terms, label
        self.kind = declared_in(function).kind
        self.token_local = declared_in(function).token_local and not terms.correction.startswith("seq_")
        self.streams = streams_of(self.kind, terms) - ({"teacher_logprobs"} if reference_teaches else set())
        self.max_length = terms.max_length or max_length
        if terms.aggregate == "fixed_length" and not self.max_length:
            raise ValueError("loss.aggregate=fixed_length divides by loss.max_length, which is null; set it, or sampling.max_tokens")
        self.controller = KlController(terms.kl.beta, terms.kl.target_kl, terms.kl.gain)

    def __call__(self, tokens: TokenBatch, num_loss_tokens: int, num_sequences: int, num_groups: int | None = None) -> tuple[Tensor, Stats]:
        """`loss` of tokens that all belong to every loss: the counts of the global batch are the same for each. Raises the same errors."""
        count = Count(tokens=num_loss_tokens, sequences=num_sequences, groups=UNKNOWN if num_groups is None else num_groups)
        return self.loss(tokens, LossCounts(all=count, own={}, kl=count))

    def loss(self, tokens: TokenBatch, counts: LossCounts) -> tuple[Tensor, Stats]:
        """This micro-batch's share of the global loss (a scalar; shares add up), and its diagnostics.

        The own loss reads the sampled tokens with a weight, the KL term those with a weight for it, cross-entropy any token with
        `ce_weights`. Each is divided by its own count. Raises ValueError for a KL term without a reference, for shapes, ids, lengths or
        counts that disagree, and for a correction by token of a loss by sequence.
        """
        tokens = tokens.in_float64()
        if "teacher_logprobs" not in self.streams:
            tokens = replace(tokens, teacher_logp=None)
        main_weights = tokens.ref_kl_weights if self.kind == "ref_kl" else tokens.policy_weights
        main, count = tokens.pick(_and(tokens.sampled, main_weights)), counts.of(self.kind)
        main.check(count.tokens, count.sequences)
        result = self._policy_loss(main)
        weights = main.ref_kl_weights if self.kind == "ref_kl" else main.policy_weights

        def share(per_token: Tensor) -> Tensor:
            return self.aggregate(main.rollout_sum(per_token), main, count.tokens, count.sequences, count.groups)

        def weighted(per_token: Tensor) -> Tensor:
            return per_token if weights is None else per_token * weights

        if result.unit == "sequence":
            sums = result.loss * (main.rollout_lengths if weights is None else main.rollout_sum(weights))
            parts = {"policy": self.aggregate(sums, main, count.tokens, count.sequences, count.groups)}
        else:
            parts = {"policy": share(weighted(result.loss))}
        if result.penalty is not None:
            parts["policy"] = parts["policy"] + share(weighted(result.penalty))
        if self.terms.entropy_coef != 0:
            parts["entropy"] = share(-self.terms.entropy_coef * main.entropy)
        if self.controller.beta != 0:
            parts["kl"] = self._kl_term(tokens, counts.kl)
        if self.terms.ce_coef != 0:
            learned = tokens.pick(torch.zeros_like(tokens.logp, dtype=torch.bool) if tokens.ce_weights is None else tokens.ce_weights != 0)
            nll = -learned.logp if learned.ce_weights is None else -learned.logp * learned.ce_weights
            parts["ce"] = self.terms.ce_coef * nll.sum() / max(counts.ce_tokens, 1)
        total = torch.stack(list(parts.values())).sum()
        stats = diagnostics(main, result, counts.all.tokens, counts.all.sequences)
        for name in ("policy", "kl", "entropy", *(["ce"] if "ce" in parts else [])):
            stats.sums[f"loss/{name}"] = parts[name].detach() if name in parts else torch.zeros_like(total)
        stats.sums["loss/total"] = total.detach()
        if "ce" in parts:
            stats.sums["ce/nll"] = -learned.logp.detach().sum() / max(counts.ce_tokens, 1)
            stats.sums["ce/tokens"] = torch.zeros_like(total) + len(learned.logp)
        if self.kind == "ref_kl":
            teacher = main.ref_logp if main.teacher_logp is None else main.teacher_logp
            apart = torch.zeros_like(main.logp) if teacher is None else main.logp.detach() - teacher  # None: without tokens
            stats.sums["teacher/kl"] = apart.sum() / max(count.tokens, 1)
        return total, stats

    def _kl_term(self, tokens: TokenBatch, count: Count) -> Tensor:
        """β · KL over the sampled tokens with a weight for it."""
        if tokens.ref_logp is None:
            raise ValueError(f"loss.kl.beta is {self.controller.beta}, but there is no reference model to compare with")
        compared = tokens.pick(_and(tokens.sampled, tokens.ref_kl_weights))
        assert compared.ref_logp is not None
        kl = self.controller.beta * kl_estimate(self.terms.kl.estimator, compared.logp, compared.ref_logp)
        if compared.ref_kl_weights is not None:
            kl = kl * compared.ref_kl_weights
        return self.aggregate(compared.rollout_sum(kl), compared, count.tokens, count.sequences, count.groups)

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

    def aggregate(self, sums: Tensor, tokens: TokenBatch, num_loss_tokens: int, num_sequences: int, num_groups: int) -> Tensor:
        """[R] sums of ℓ_t over each rollout's tokens → scalar, by `loss.aggregate` (docs/objectives.md).

        Every aggregate weighs the tokens of one rollout alike. Raises ValueError for `group_token_mean` if the groups are unknown.
        """
        sequences = max(num_sequences, 1)
        if self.terms.aggregate == "token_mean":
            return sums.sum() / max(num_loss_tokens, 1)
        if self.terms.aggregate == "seq_mean":
            return (sums / tokens.whole_lengths.clamp(min=1)).sum() / sequences
        if self.terms.aggregate == "seq_sum":
            return sums.sum() / sequences
        if self.terms.aggregate == "group_token_mean":
            if tokens.group_lengths is None or num_groups == UNKNOWN:
                raise ValueError("loss.aggregate is group_token_mean, but these tokens do not say which prompt's group they belong to")
            return (sums / tokens.group_lengths.clamp(min=1)).sum() / max(num_groups, 1)
        assert self.max_length is not None
        return sums.sum() / (sequences * self.max_length)
