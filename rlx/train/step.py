"""One optimizer step: forward and backward over micro-batches, sum of gradients over ranks, clipping, update, and global metrics.

Reinforcement and supervised learning use the same code with different objectives. Every rank divides its loss by counts of the global
batch, so gradients are plain sums over micro-batches and ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlx.config.schema import SchedulerConfig
from rlx.losses.base import Objective
from rlx.losses.diagnostics import Stats, check_counts, completed
from rlx.losses.mix import LossMix
from rlx.losses.tokens import TokenBatch
from rlx.models.layout import build_layout
from rlx.models.policy import PolicyModel
from rlx.models.shard import free_gathered
from rlx.models.slots import Slot
from rlx.parallel.mesh import Mesh, one_process
from rlx.train.optim import NotFiniteError, clip_gradients, learning_rate, set_learning_rate
from rlx.train.reference import Reference
from rlx.types import STREAMS, MicroBatch, MiniBatch, RankBatch, check_streams

IN_TOKENS = {"teacher_logprobs": "teacher_logp"}  # streams with another name in `TokenBatch`
OF_SAMPLED = ("mismatch/", "policy/ratio", "policy/ess", "policy/clip_frac", "policy/masked_frac")
"""Beginnings of the names of metrics that compare with the policy that sampled the tokens."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """A micro-batch on the device: the tensors of its N tokens that the model and a loss read."""

    index: Tensor  # [N] int64 into the computed tokens
    labels: Tensor  # [N] int64
    temperature: Tensor  # [N]
    inference_logp: Tensor  # [N]
    advantages: Tensor  # [N]
    rollout_ids: Tensor  # [N] int64
    rollout_lengths: Tensor  # [R] int64
    tokens_elsewhere: Tensor  # [R] int64
    sampled_lengths: Tensor  # [R] int64 sampled tokens of each rollout
    group_lengths: Tensor  # [R] int64
    objectives: Tensor  # [R] int64
    versions: Tensor  # [N] int64
    streams: dict[str, Tensor]  # [N] each, by the names in `TokenBatch`
    sampled: Tensor | None  # bool [N]; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """Log-probabilities of a micro-batch's N trainable tokens from before the batch's first optimizer step."""

    old_logp: Tensor | None  # [N] under the policy; None: use this optimizer step's own forward, or the engine's
    ref_logp: Tensor | None  # [N] under the reference; None: no reference


class PolicyTrainer:
    """Owns model, objective and optimizer of one rank."""

    def __init__(
        self,
        model: PolicyModel | Slot,
        objective: Objective | LossMix,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: SchedulerConfig | None = None,
        total_updates: int = 0,
        max_norm: float | None = None,
        mesh: Mesh | None = None,
        reference: Reference | None = None,
    ) -> None:
        """`model`: the policy; or a slot, whose rows `rlx.train.together` computes.

        `mesh` says where the model computes and with which ranks; None: one process, on the parameters' device.

        `total_updates` is the number of optimizer steps of the whole run, for decaying schedules. A `schedule` of None is constant.
        """
        self.model: Any = model
        self.losses, self.optimizer = LossMix.of(objective), optimizer
        self.slot = model.number if isinstance(model, Slot) else 0
        self.schedule, self.total_updates, self.max_norm = schedule or SchedulerConfig(), total_updates, max_norm
        self.reference = reference
        self.own_samples = True  # False: a version that a sample names is another model than this trainer's version of that number
        self.updates = 0  # optimizer steps done
        self.forward_only: list[int] = []  # lengths of the last batch's sequences without a backward, once for each forward
        self.warning: str | None = None  # for the user: the measured mismatch exceeds the objective's bounds
        self.engine_noise = math.inf  # nats a token by which the engine may differ from the trainer in the mean, at the same version
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.mesh = mesh or one_process(self.parameters[0].device)
        self.device = self.mesh.device
        self.peak_lr = optimizer.param_groups[0]["lr"]
        # Called before each micro-batch is scored, and before its forward and backward. All ranks call it equally often.
        self.before_micro_batch: Callable[[], None] = lambda: None  # may raise to give the step up
        # Called after each row's forward with the row, logp [N] and entropy [N] of its scored tokens.
        self.after_forward: Callable[[MicroBatch, Tensor, Tensor], None] = lambda row, logp, entropy: None

    @property
    def padded(self) -> bool:
        """Whether the policy or the reference computes samples padded to the longest of a row, so that rows must be packed for that."""
        return self.model.padded or (self.reference is not None and self.reference.model.padded)

    def train_batch(
        self,
        batch: RankBatch,
        *,
        iterations: int = 1,
        starts: Callable[[int, int], None] = lambda update, of: None,
    ) -> dict[str, float]:
        """All optimizer steps of one batch: its mini-batches in order, `iterations` times. Returns one record of metrics.

        Scores by policy and reference are taken once, before the first step. `starts(update, of)` is called before each step.
        Mini-batches without a trainable token do not count in the metrics, unless no mini-batch has one.
        Raises ValueError, before any change, for a stream that the objective does not consume.
        """
        for mini_batch in batch.mini_batches:
            for micro_batch in mini_batch.micro_batches:
                self.refuse_what_nobody_uses(micro_batch)
        self.forward_only = []
        began, of = time.perf_counter(), iterations * len(batch.mini_batches)
        before = [self._score_before(mini_batch, recompute=of > 1) for mini_batch in batch.mini_batches]
        scored = time.perf_counter() - began
        records: list[dict[str, float]] = []
        empty: list[dict[str, float]] = []  # of mini-batches without a trainable token, whose means are meaningless
        for _ in range(iterations):
            for mini_batch, scores in zip(batch.mini_batches, before, strict=True):
                starts(len(records), of)
                step = batch.step if batch.sampled else None
                metrics = self.train_minibatch(mini_batch, step=step, before=scores, fresh=not records)
                if not records:
                    self.warn_of(metrics)
                (records if mini_batch.trains else empty).append(metrics)
        values = merge_metrics(records or empty)
        values["time/forward_backward"] += scored
        return values

    def warn_of(self, metrics: dict[str, float]) -> None:
        """Look for a warning in the metrics of a batch's first optimizer step."""
        if not self.own_samples or metrics.get("off_policy/lag_max") != 0:  # the mismatch includes updates
            return
        if (differ := metrics.get("mismatch/abs_logp_diff_mean", 0.0)) > self.engine_noise:
            self.warning = (
                f"trainer and inference compute different policies from the same weights: the log-probabilities of the sampled tokens "
                f"differ by {differ:.3g} nats in the mean, and rounding explains at most {self.engine_noise:g}. Look for what only one of "
                "them has: sampling parameters of an environment's requests, an option in inference.vllm, a model that transformers and "
                "vLLM compute differently"
            )
        self.warning = self.warning or self.losses.warning(metrics)

    def give_up(self) -> None:
        """Discard an unfinished optimizer step, after `before_micro_batch` raised. Parameters and optimizer stay as they were before it."""
        self.optimizer.zero_grad(set_to_none=True)
        self.reshard()

    def reshard(self) -> None:
        """Free the parameters that a forward without backward has gathered."""
        free_gathered(self.model)
        if self.reference is not None:
            free_gathered(self.reference.model)

    def _score_before(self, mini_batch: MiniBatch, recompute: bool) -> list[Before]:
        """Scores from before the first optimizer step, one per micro-batch.

        Without `recompute` there is only one optimizer step, and its own forward gives the old log-probabilities.
        """
        recompute = recompute and self.losses.recomputes
        scores = []
        with self.model.computing() if recompute else nullcontext(), self._referring():
            for micro_batch in mini_batch.micro_batches:
                self.before_micro_batch()
                old = self.score(micro_batch)[0] if recompute else None
                ref = None
                if self.reference is not None:
                    with self.reference.scoring():
                        ref = self.score(micro_batch, self.reference.model)[0]
                scores.append(Before(old_logp=old, ref_logp=ref))
        if self.reference is not None:
            self.reference.scored()
        return scores

    def _referring(self) -> AbstractContextManager[None]:
        return nullcontext() if self.reference is None else self.reference.model.computing()

    def train_minibatch(
        self, mini_batch: MiniBatch, *, step: int | None = None, before: Sequence[Before] | None = None, fresh: bool = True
    ) -> dict[str, float]:
        """One optimizer step on this rank's micro-batches. The metrics are those of the global batch, equal on every rank.

        `step` is the policy version being trained, for the age of tokens. None: supervised data, which no policy sampled; its metrics have
        the perplexity, but neither ages nor ratios nor the mismatch with an engine.
        `before` holds scores by micro-batch if they are already computed. `fresh`: no optimizer step was taken since version `step`.
        Without a trainable token on any rank nothing changes, not even the optimizer's momentum or the KL controller.
        Raises ValueError for counts that differ from the mini-batch's, and NotFiniteError for a NaN or infinite loss or gradient, both
        before any change.
        """
        started = time.perf_counter()
        stats = self.accumulate_gradients(mini_batch, step=step, before=before, fresh=fresh)
        return self.update(stats, mini_batch, step=step, started=started)

    def update(self, stats: Stats, mini_batch: MiniBatch, *, step: int | None, started: float) -> dict[str, float]:
        """The optimizer step after the gradients of a mini-batch are accumulated, with their `stats` of this rank.

        `started`: `time.perf_counter()` before the first forward. See `train_minibatch`.
        """
        where = f"optimizer step {self.updates}"
        metrics = self._reduce(stats, mini_batch)
        if step is None:
            metrics = _of_supervised(metrics)
        if not math.isfinite(metrics["loss/total"]):
            raise NotFiniteError(f"{where}: the loss is {metrics['loss/total']}; lower optim.lr, and look at the last metrics")
        computed = time.perf_counter()
        metrics["optim/grad_norm"] = clip_gradients(self.parameters, self.max_norm, where, self.mesh)
        lr = learning_rate(self.updates, self.peak_lr, self.schedule, self.total_updates)
        metrics["optim/lr"] = set_learning_rate(self.optimizer, lr / self.peak_lr if self.peak_lr else 0.0)
        if mini_batch.trains:
            self.optimizer.step()
            self.updates += 1
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.after_update(metrics, changed=mini_batch.trains)
        self.mesh.synchronize()  # the optimizer's kernels are only launched
        metrics["time/forward_backward"] = computed - started
        metrics["time/optimizer"] = time.perf_counter() - computed
        return metrics

    def accumulate_gradients(
        self, mini_batch: MiniBatch, *, step: int | None = None, before: Sequence[Before] | None = None, fresh: bool = True
    ) -> Stats:
        """Forward and backward of all micro-batches of this rank. Adds to existing gradients. Returns this rank's share of the stats."""
        stats = Stats()
        known = before if before is not None else self._score_before(mini_batch, recompute=False)
        with self.model.computing():
            for micro_batch, scores in zip(mini_batch.micro_batches, known, strict=True):
                self.before_micro_batch()
                inputs, logp, entropy = self._forward(micro_batch, self.model)
                self.after_forward(micro_batch, logp, entropy)
                loss, more = self.loss_of(inputs, logp, entropy, scores, mini_batch, step=step, fresh=fresh)
                if not self._backward(loss, logp, entropy):
                    self.forward_only += np.diff(micro_batch.cu_seqlens).tolist()
                stats.add(more)
                del loss, logp, entropy  # they hold the activations of a row that had no backward, during the next forward
        return stats

    def loss_of(
        self,
        inputs: Inputs,
        logp: Tensor,
        entropy: Tensor,
        scores: Before,
        mini_batch: MiniBatch,
        *,
        step: int | None,
        fresh: bool,
    ) -> tuple[Tensor, Stats]:
        """A micro-batch's share of the loss, and its stats. logp [N] and entropy [N] are of its tokens; `step` as in `train_minibatch`."""
        tokens = TokenBatch(
            logp=logp,
            old_logp=logp.detach() if scores.old_logp is None else scores.old_logp,
            inference_logp=inputs.inference_logp,
            entropy=entropy,
            advantages=inputs.advantages,
            rollout_ids=inputs.rollout_ids,
            rollout_lengths=inputs.rollout_lengths,
            tokens_elsewhere=inputs.tokens_elsewhere,
            group_lengths=inputs.group_lengths,
            ref_logp=scores.ref_logp,
            sampled=inputs.sampled,
            objectives=inputs.objectives,
            **inputs.streams,
        )
        if step is not None:
            newest = tokens.rollout_sum((inputs.versions == step).to(logp.dtype)) == inputs.sampled_lengths
            tokens = replace(tokens, on_policy=newest & (fresh and self.own_samples))
        loss, more = self.losses(tokens, mini_batch.counts)
        if step is not None:
            versions = inputs.versions if inputs.sampled is None else inputs.versions[inputs.sampled]
            _add_lag(more, step - versions)
        else:
            own = logp.detach()
            trained = own if inputs.sampled is None or not mini_batch.num_loss_tokens else own[inputs.sampled]
            more.sums["loss/nll"] = -trained.double().sum() / max(mini_batch.num_trained_tokens, 1)
        return loss, more

    def _backward(self, loss: Tensor, logp: Tensor, entropy: Tensor) -> bool:
        """Add the row's gradients. A row whose tokens do not move the loss (all groups with equal rewards) costs no backward.

        The first row always has one, so that the optimizer finds gradients. Several ranks have one for each row, because they reduce
        gradients together. Returns whether the row had one.
        """
        if self.mesh.world_size > 1 or self.parameters[0].grad is None:
            loss.backward()
            return True
        gradients = zip((logp, entropy), torch.autograd.grad(loss, (logp, entropy), allow_unused=True), strict=True)
        moving = [(of, gradient) for of, gradient in gradients if gradient is not None]
        if not any(gradient.any() for _, gradient in moving):
            if self.mesh.grouped:
                free_gathered(self.model)  # backward would have
            return False
        torch.autograd.backward([of for of, _ in moving], [gradient for _, gradient in moving])
        return True

    def score(self, micro_batch: MicroBatch, model: PolicyModel | None = None) -> tuple[Tensor, Tensor]:
        """(logp [N], entropy [N]) of a micro-batch's trainable tokens in their order, without gradient. `model` defaults to the policy."""
        model = model or self.model
        with torch.no_grad(), model.computing():
            _, logp, entropy = self._forward(micro_batch, model)
        return logp, entropy

    def _forward(self, micro_batch: MicroBatch, model: PolicyModel) -> tuple[Inputs, Tensor, Tensor]:
        """(inputs, logp [N], entropy [N]) of a micro-batch alone in its row."""
        self.refuse_what_nobody_uses(micro_batch)
        m = micro_batch
        layout = build_layout(m.token_ids, m.cu_seqlens, m.scored, model.layout_kind(self.device), self.device)
        inputs = self.inputs(m, layout.where)
        logp, entropy = model(layout, inputs.index, inputs.labels, inputs.temperature)
        return inputs, logp, entropy

    def inputs(self, micro_batch: MicroBatch, where: np.ndarray) -> Inputs:
        """A micro-batch on the device. `where` [T]: the index of each of its tokens in the computed tokens of the row (`Layout.where`)."""
        m, device, scored = micro_batch, self.device, micro_batch.scored

        def trainable(array, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(array[scored]).to(device=device, dtype=dtype)

        def by_rollout(array) -> Tensor:
            return torch.from_numpy(array).to(device=device, dtype=torch.int64)

        streams = {name: getattr(m, name) for name in STREAMS if getattr(m, name) is not None}

        return Inputs(
            index=trainable(where, torch.int64),
            labels=trainable(m.labels, torch.int64),
            temperature=trainable(m.temperature, torch.float32),
            inference_logp=trainable(m.inference_logprobs, torch.float32),
            advantages=trainable(m.advantages, torch.float32),
            rollout_ids=trainable(m.rollout_ids, torch.int64),
            rollout_lengths=by_rollout(np.bincount(m.rollout_ids[scored], minlength=len(m.rollout_lengths))),
            sampled_lengths=by_rollout(m.rollout_lengths),
            tokens_elsewhere=by_rollout(m.tokens_elsewhere),
            group_lengths=by_rollout(m.group_lengths),
            objectives=by_rollout(m.objectives),
            versions=trainable(m.versions, torch.int64),
            streams={IN_TOKENS.get(name, name): trainable(array, torch.float32) for name, array in streams.items()},
            sampled=None if m.ce_weights is None else trainable(m.loss_mask, torch.bool),
        )

    def refuse_what_nobody_uses(self, micro_batch: MicroBatch) -> None:
        """Raise ValueError for data that would be ignored silently. Every rank has the same streams, so every rank raises."""
        check_streams([name for name in STREAMS if getattr(micro_batch, name) is not None], self.losses.streams)
        if (micro_batch.adapters != self.slot).any():
            raise ValueError(f"a sample is for the adapter of slot {micro_batch.adapters.max()}, but this trainer trains slot {self.slot}")

    def _reduce(self, stats: Stats, mini_batch: MiniBatch) -> dict[str, float]:
        """Reduce sums and maxima over all ranks. Raises ValueError if they do not cover the whole mini-batch."""
        sums, maxima = torch.stack(list(stats.sums.values())), torch.stack(list(stats.maxima.values()))
        self.mesh.sum(sums)
        self.mesh.max(maxima)
        totals = dict(zip(stats.sums, sums.tolist(), strict=True))
        check_counts(totals, mini_batch.num_loss_tokens, mini_batch.num_sequences, mini_batch.num_groups)
        return completed(totals, dict(zip(stats.maxima, maxima.tolist(), strict=True)))


def _add_lag(stats: Stats, lag: Tensor) -> None:
    """Add the age of the sampled tokens, also of those that only have a weight of 0: lag [N] in policy versions."""
    stats.sums |= {"off_policy/lag_mean": lag.sum().double(), "lags": lag.new_full((), len(lag), dtype=torch.float64)}
    stats.maxima["off_policy/lag_max"] = (
        lag.max().double() if len(lag) else torch.tensor(-torch.inf, dtype=torch.float64, device=lag.device)
    )


def _of_supervised(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics of data that no policy sampled: without comparisons to a sampling policy, and with the perplexity."""
    kept = {name: value for name, value in metrics.items() if not name.startswith(OF_SAMPLED)}
    return kept | {"loss/perplexity": perplexity(metrics["loss/nll"])}


def perplexity(nll: float) -> float:
    """exp of the mean negative log-probability of a token, in nats; at most e^690, so that it stays a number."""
    return math.exp(min(nll, 690.0))


def merge_metrics(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Merge the records of one batch's optimizer steps: `…_max` and `…_min` keep the extreme, `time/…` adds up, others are averaged."""
    merged = {}
    for name in metrics[0]:
        values = [m[name] for m in metrics]
        if name.endswith("_max"):
            merged[name] = max(values)
        elif name.endswith("_min"):
            merged[name] = min(values)
        else:
            merged[name] = sum(values) / (1 if name.startswith("time/") else len(values))
    return merged
