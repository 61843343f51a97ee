"""The optimizer steps of a batch: forward and backward over rows, sum of gradients over ranks, clipping, update, and global metrics.

    rows of run 0 ─┐                                      ┌► loss of run 0 ─┐                     ┌► clip, schedule, step of run 0
    rows of run 1 ─┴► one row of the model ─► logp [N] ─┴► loss of run 1 ─┴► sum ─► backward ─┴► clip, schedule, step of run 1

Usually there is one run. In a shared trainer (docs/lora.md) the model is frozen and an adapter meets its own run's tokens only, so the
gradient of the sum is the gradient of each, and a run learns as it would alone, up to the order of sums.

Reinforcement and supervised learning use the same code with different objectives. Every rank divides its loss by counts of the global
batch, so gradients are plain sums over micro-batches and ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlx.config.schema import SchedulerConfig
from rlx.losses.base import Objective
from rlx.losses.diagnostics import Stats, check_counts, completed
from rlx.losses.mix import LossMix
from rlx.losses.tokens import TokenBatch
from rlx.models.policy import PolicyModel
from rlx.models.shard import free_gathered
from rlx.models.slots import Slot
from rlx.parallel.mesh import Mesh, one_process
from rlx.train.optim import NotFiniteError, clip_gradients, learning_rate, set_learning_rate
from rlx.train.reference import Reference
from rlx.train.rows import forward
from rlx.types import MicroBatch, MiniBatch, RankBatch, check_streams

POLICY_METRIC_PREFIXES = ("mismatch/", "policy/ratio", "policy/ess", "policy/clip_frac", "policy/masked_frac")
"""Beginnings of the names of metrics that compare with the policy that sampled the tokens."""

Row = Mapping[int, MicroBatch]  # the parts of a row, by slot in ascending order
Known = dict[int, dict[str, Tensor]]  # by `id` of a micro-batch: fields of its `TokenBatch` from before the first optimizer step
Outcome = dict[str, float] | Exception  # a run's metrics, or why its update failed


class PolicyTrainer:
    """Owns model, objective and optimizer of one run, on one rank."""

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
        """`model`: the policy; or a slot of a model with several adapters.

        `mesh` says where the model computes and with which ranks; None: one process, on the parameters' device.

        `total_updates` is the number of optimizer steps of the whole run, for decaying schedules. A `schedule` of None is constant.
        """
        self.model: Any = model
        self.whole: Any = model.whole if isinstance(model, Slot) else model  # which computes
        self.losses, self.optimizer = LossMix.of(objective), optimizer
        self.slot = model.number if isinstance(model, Slot) else 0
        self.schedule, self.total_updates, self.max_norm = schedule or SchedulerConfig(), total_updates, max_norm
        self.reference = reference
        self.sampled_by_this_run = True  # False: a version that a sample names is another model than this trainer's version of that number
        self.updates = 0  # optimizer steps done
        self.forward_only: list[int] = []  # lengths of the last batch's sequences without a backward, once for each forward
        self.warning: str | None = None  # for the user: the measured mismatch exceeds the objective's bounds
        self.engine_noise = math.inf  # nats a token by which the engine may differ from the trainer in the mean, at the same version
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.mesh = mesh or one_process(self.parameters[0].device)
        self.device = self.mesh.device
        self.peak_lr = optimizer.param_groups[0]["lr"]
        # Called before a row is scored, and before its forward and backward. All ranks call it equally often.
        self.before_micro_batch: Callable[[], None] = lambda: None  # may raise to give the step up
        # Called after each row's forward with the row, logp [N] and entropy [N] of its scored tokens.
        self.after_forward: Callable[[MicroBatch, Tensor, Tensor], None] = lambda row, logp, entropy: None

    @property
    def padded(self) -> bool:
        """Whether the policy or the reference computes samples padded to the longest of a row, so that rows must be packed for that."""
        return self.whole.padded or (self.reference is not None and self.reference.model.padded)

    def train_batch(
        self, batch: RankBatch, *, iterations: int = 1, starts: Callable[[int, int], None] = lambda update, of: None
    ) -> dict[str, float]:
        """`train` one run alone. Raises ValueError, before any change, for a stream that the objective does not consume."""
        (outcome,) = train({self.slot: batch}, {self.slot: self}, {self.slot: iterations}, starts).values()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def accumulate_gradients(
        self, mini_batch: MiniBatch, *, step: int | None = None, before: Known | None = None, stale: bool = False
    ) -> Stats:
        """Forward and backward of all micro-batches of this rank. Adds to existing gradients. For the arguments see `_accumulate`."""
        rows = [{self.slot: row} for row in mini_batch.micro_batches]
        known = score_before(rows, {self.slot: self}, set()) if before is None else before
        stats, broken = _accumulate(
            rows, known, {self.slot: mini_batch}, {self.slot: self}, {self.slot: step}, {self.slot} if stale else set()
        )
        if broken:
            raise broken[self.slot]
        return stats[self.slot]

    def update(self, stats: Stats, mini_batch: MiniBatch, *, step: int | None, started: float) -> dict[str, float]:
        """The optimizer step after the gradients of a mini-batch are accumulated, with their `stats` of this rank.

        The metrics are those of the global batch, equal on every rank. `started`: `time.perf_counter()` before the first forward.
        Without a trainable token on any rank nothing changes, not even the optimizer's momentum or the KL controller.
        Raises ValueError for counts that differ from the mini-batch's, and NotFiniteError for a NaN or infinite loss or gradient, both
        before any change.
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

    def loss_of(self, tokens: TokenBatch, row: MicroBatch, mini_batch: MiniBatch, step: int | None, stale: bool) -> tuple[Tensor, Stats]:
        """A micro-batch's share of the loss, and its stats. For the arguments see `_accumulate`."""
        if step is None:
            loss, more = self.losses(tokens, mini_batch.counts)
            own = tokens.logp.detach()
            nll = own if tokens.sampled is None or not mini_batch.num_loss_tokens else own[tokens.sampled]
            more.sums["loss/nll"] = -nll.double().sum() / max(mini_batch.num_trained_tokens, 1)
            return loss, more
        versions = row.versions[row.loss_mask]
        newest = np.bincount(row.rollout_ids[row.loss_mask], versions == step, len(row.rollout_lengths))
        fresh = (newest == row.rollout_lengths) & (self.sampled_by_this_run and not stale)
        loss, more = self.losses(replace(tokens, on_policy=torch.from_numpy(fresh).to(self.device)), mini_batch.counts)
        lag = step - versions.astype(np.float64)  # the age of the sampled tokens, also of those that only have a weight of 0
        known: Any = {"device": self.device, "dtype": torch.float64}
        more.sums |= {"off_policy/lag_mean": torch.tensor(lag.sum(), **known), "lags": torch.tensor(len(lag), **known)}
        more.maxima["off_policy/lag_max"] = torch.tensor(lag.max(initial=-math.inf), **known)
        return loss, more

    @torch.no_grad()
    def score(self, micro_batch: MicroBatch, model: PolicyModel | None = None) -> tuple[Tensor, Tensor]:
        """(logp [N], entropy [N]) of a micro-batch's scored tokens in their order, without gradient. `model` defaults to the policy."""
        (tokens,) = forward(model or self.whole, [micro_batch], self.device)
        return tokens.logp, tokens.entropy

    def warn_of(self, metrics: dict[str, float]) -> None:
        """Look for a warning in the metrics of a batch's first optimizer step."""
        if not self.sampled_by_this_run or metrics.get("off_policy/lag_max") != 0:  # the mismatch includes updates
            return
        if (differ := metrics.get("mismatch/abs_logp_diff_mean", 0.0)) > self.engine_noise:
            self.warning = (
                f"trainer and inference compute different policies from the same weights: the log-probabilities of the sampled tokens "
                f"differ by {differ:.3g} nats in the mean, and rounding explains at most {self.engine_noise:g}. Look for what only one of "
                "them has: sampling parameters of an environment's requests, an option in inference.vllm, a model that transformers and "
                "vLLM compute differently"
            )
        self.warning = self.warning or self.losses.warning(metrics)

    def abort_step(self) -> None:
        """Discard an unfinished optimizer step, after `before_micro_batch` raised. Parameters and optimizer stay as they were before it."""
        self.optimizer.zero_grad(set_to_none=True)
        self.reshard()

    def reshard(self) -> None:
        """Free the parameters that a forward without backward has gathered."""
        free_gathered(self.whole)
        if self.reference is not None:
            free_gathered(self.reference.model)

    def _reduce(self, stats: Stats, mini_batch: MiniBatch) -> dict[str, float]:
        """Reduce sums and maxima over all ranks. Raises ValueError if they do not cover the whole mini-batch."""
        sums, maxima = torch.stack(list(stats.sums.values())), torch.stack(list(stats.maxima.values()))
        self.mesh.sum(sums)
        self.mesh.max(maxima)
        totals = dict(zip(stats.sums, sums.tolist(), strict=True))
        check_counts(totals, mini_batch.num_loss_tokens, mini_batch.num_sequences, mini_batch.num_groups)
        return completed(totals, dict(zip(stats.maxima, maxima.tolist(), strict=True)))


def train(
    batches: Mapping[int, RankBatch],
    trainers: Mapping[int, PolicyTrainer],
    iterations: Mapping[int, int],
    starts: Callable[[int, int], None] = lambda update, of: None,
) -> dict[int, Outcome]:
    """All optimizer steps of one batch of each run, by slot: its mini-batches in order, `iterations` times. Every rank calls this.

    Several batches come from `rlx.data.packing.pack_together`; mini-batch j of all runs is trained together, as far as they have one.
    Returns each run's record of metrics. Mini-batches without a trainable token do not count in it, unless no mini-batch has one.
    A run whose loss or gradient is not finite has the error instead, and its adapter stays as it was before that step; the others go on.
    Scores by policy and reference are taken once, before the first step. `starts(update, of)` is called before each step of a run.
    Raises ValueError, before any change, for a stream that a run's objective does not consume.
    """
    for slot, batch in batches.items():
        trainers[slot].forward_only = []
        check_streams(batch.streams, trainers[slot].losses.streams)  # every rank has the same, so every rank raises
    began = time.perf_counter()
    total = {slot: iterations[slot] * len(batch.mini_batches) for slot, batch in batches.items()}
    rows = [_rows(batches, number) for number in range(max(len(batch.mini_batches) for batch in batches.values()))]
    several = {slot for slot in batches if total[slot] > 1}
    before: Known = {}
    for each in rows:
        before |= score_before(each, trainers, several)
    scored = time.perf_counter() - began
    records: dict[int, list[dict[str, float]]] = {slot: [] for slot in batches}
    empty: dict[int, list[dict[str, float]]] = {slot: [] for slot in batches}  # of mini-batches without a trainable token
    failed: dict[int, Outcome] = {}
    for iteration in range(max(iterations[slot] for slot in batches)):
        for number in range(len(rows)):
            minis = {
                slot: batch.mini_batches[number]
                for slot, batch in batches.items()
                if slot not in failed and number < len(batch.mini_batches) and iteration < iterations[slot]
            }
            if not minis:
                continue
            for slot in minis:
                starts(len(records[slot]), total[slot])
            started = time.perf_counter()
            steps = {slot: batches[slot].step if batches[slot].sampled else None for slot in minis}
            stale = {slot for slot in minis if records[slot]}
            stats, broken = _accumulate(rows[number], before, minis, trainers, steps, stale)
            for slot, mini_batch in minis.items():
                try:
                    if slot in broken:
                        raise broken[slot]
                    metrics = trainers[slot].update(stats[slot], mini_batch, step=steps[slot], started=started)
                except Exception as error:  # every rank has the same sums, and `broken` is agreed on
                    trainers[slot].optimizer.zero_grad(set_to_none=True)
                    if isinstance(error, torch.OutOfMemoryError):
                        raise
                    failed[slot] = error
                    continue
                if not records[slot]:
                    trainers[slot].warn_of(metrics)
                (records if mini_batch.trains else empty)[slot].append(metrics)
            for slot in minis:
                if trainers[slot].whole.slots is not None:  # slots without a run in this step
                    trainers[slot].whole.zero_grad(set_to_none=True)
    merged = {slot: merge_metrics(records[slot] or empty[slot]) for slot in batches if slot not in failed}
    return failed | {slot: values | {"time/forward_backward": values["time/forward_backward"] + scored} for slot, values in merged.items()}


def _rows(batches: Mapping[int, RankBatch], number: int) -> list[Row]:
    """The rows of mini-batch `number`, as far as the runs have one."""
    own = {slot: batch.mini_batches[number].micro_batches for slot, batch in sorted(batches.items()) if number < len(batch.mini_batches)}
    return [dict(zip(own, parts, strict=True)) for parts in zip(*own.values(), strict=True)]


@torch.no_grad()
def score_before(rows: Sequence[Row], trainers: Mapping[int, PolicyTrainer], several: set[int]) -> Known:
    """What is known of the rows before the first update: scores by the policy for runs with `several` updates, by the reference.

    With one update, its own forward gives the old log-probabilities.
    """
    known: Known = {}
    used: dict[int, PolicyModel] = {}
    for row in rows:
        old = [slot for slot in row if slot in several and trainers[slot].losses.recomputes]
        compared = [slot for slot in row if trainers[slot].reference is not None]
        for name, slots in (("old_logp", old), ("ref_logp", compared)):
            if not slots:
                continue
            first = trainers[slots[0]]
            first.before_micro_batch()
            reference = first.reference if name == "ref_logp" else None  # of several runs, the same model without adapters
            model = first.whole if reference is None else reference.model
            used[id(model)] = model
            parts = [row[slot] for slot in slots]
            with nullcontext() if reference is None else reference.scoring():
                for part, tokens in zip(parts, forward(model, parts, first.device), strict=True):
                    known.setdefault(id(part), {})[name] = tokens.logp
    for model in used.values():
        free_gathered(model)  # scoring has no backward, which would free some of the parameters
    return known


def _accumulate(
    rows: Sequence[Row],
    before: Known,
    minis: Mapping[int, MiniBatch],
    trainers: Mapping[int, PolicyTrainer],
    steps: Mapping[int, int | None],
    stale: Collection[int],
) -> tuple[dict[int, Stats], dict[int, Exception]]:
    """Forward and backward of all rows. Returns this rank's share of each run's stats, and the errors of runs whose loss failed.

    `steps`: the policy version that each run trains. None: supervised data, which no policy sampled; its metrics have the perplexity, but
    neither ages nor ratios nor the mismatch with an engine. `stale`: runs that have made an optimizer step since that version.
    """
    stats = {slot: Stats() for slot in minis}
    broken: dict[int, Exception] = {}
    one = trainers[next(iter(minis))]

    def loss_of(slot: int, part: MicroBatch, tokens: TokenBatch) -> Tensor:
        trainers[slot].after_forward(part, tokens.logp, tokens.entropy)
        try:
            loss, more = trainers[slot].loss_of(replace(tokens, **before.get(id(part), {})), part, minis[slot], steps[slot], slot in stale)
            if one.whole.slots is not None and not loss.requires_grad:  # alone, backward raises
                raise ValueError("the loss does not depend on the log-probabilities; something in it is detached")
        except Exception as error:  # a run's own loss may be anybody's code
            if one.whole.slots is None or isinstance(error, torch.OutOfMemoryError):
                raise
            broken[slot] = error
            return 0.0 * tokens.logp.sum().double()
        stats[slot].add(more)
        return loss.double()

    def train_row(parts: Row) -> None:
        found = dict(zip(parts, forward(one.whole, list(parts.values()), one.device), strict=True))
        loss = torch.stack([loss_of(slot, parts[slot], tokens) for slot, tokens in found.items()]).sum()
        scores = [score for tokens in found.values() for score in (tokens.logp, tokens.entropy)]
        if not _backward(loss, scores, [trainers[slot] for slot in parts]):
            for slot, part in parts.items():
                trainers[slot].forward_only += np.diff(part.cu_seqlens).tolist()

    for number, row in enumerate(rows):
        one.before_micro_batch()
        if one.mesh.copies and one.whole.sums_copies_late:
            one.whole.set_requires_all_reduce(number == len(rows) - 1)
        train_row({slot: part for slot, part in row.items() if slot in minis})
    for slot in minis if one.whole.slots is not None else ():
        if one.mesh.any(slot in broken) and slot not in broken:
            broken[slot] = RuntimeError("the loss of this run failed on another rank, whose log says why")
    return stats, broken


def _backward(loss: Tensor, scores: Sequence[Tensor], trainers: Sequence[PolicyTrainer]) -> bool:
    """Add the row's gradients. A row whose tokens do not move the loss (all groups with equal rewards) costs no backward.

    `scores`: what the model computed. The first row always has a backward, so that the optimizer finds gradients. Several ranks have one
    for each row, because they reduce gradients together. Returns whether the row had one.
    """
    if trainers[0].mesh.world_size > 1 or any(trainer.parameters[0].grad is None for trainer in trainers):
        loss.backward()
        return True
    gradients = zip(scores, torch.autograd.grad(loss, scores, allow_unused=True), strict=True)
    moving = [(of, gradient) for of, gradient in gradients if gradient is not None]
    if not any(gradient.any() for _, gradient in moving):
        if trainers[0].mesh.is_distributed:
            free_gathered(trainers[0].whole)  # backward would have
        return False
    torch.autograd.backward([of for of, _ in moving], [gradient for _, gradient in moving])
    return True


def _of_supervised(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics of data that no policy sampled: without comparisons to a sampling policy, and with the perplexity."""
    kept = {name: value for name, value in metrics.items() if not name.startswith(POLICY_METRIC_PREFIXES)}
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
