"""One optimizer step: micro-batches forward and backward, gradients summed over ranks, clipped, applied; metrics of the global batch.

The same code trains the policy by reinforcement and by supervision; only the objective differs. Knows nothing of files or of the
orchestrator. Every rank's loss is divided by the global normalisers, so gradients are plain sums over micro-batches and ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlx.config.schema import SchedulerConfig
from rlx.losses.base import Objective
from rlx.losses.diagnostics import Stats, finish
from rlx.losses.tokens import TokenBatch
from rlx.models.layout import Layout, build_layout
from rlx.models.policy import PolicyModel
from rlx.train.optim import NotFiniteError, clip_gradients, learning_rate, set_learning_rate
from rlx.types import MicroBatch, MiniBatch


@dataclass(frozen=True, slots=True)
class _Inputs:
    """A micro-batch on the device: what the model needs, and the tensors of its N trainable tokens."""

    layout: Layout
    index: Tensor  # [N] int64 into the computed tokens
    labels: Tensor  # [N] int64
    temperature: Tensor  # [N]
    inference_logp: Tensor  # [N]
    advantages: Tensor  # [N]
    rollout_ids: Tensor  # [N] int64
    rollout_lengths: Tensor  # [R] int64
    versions: Tensor  # [N] int64


class PolicyTrainer:
    """Owns model, objective and optimizer of one rank."""

    def __init__(
        self,
        model: PolicyModel,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: SchedulerConfig | None = None,
        total_updates: int = 0,
        max_norm: float | None = None,
        device: torch.device | None = None,
    ) -> None:
        """`device` is where the model computes; null: where its parameters are (they are elsewhere when offloaded).

        `total_updates` is the number of optimizer steps of the whole run, for decaying schedules. `schedule` null: constant.
        """
        self.model, self.objective, self.optimizer = model, objective, optimizer
        self.schedule, self.total_updates, self.max_norm = schedule or SchedulerConfig(), total_updates, max_norm
        self.updates = 0  # optimizer steps done
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.device = device or self.parameters[0].device
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.peak_lr = optimizer.param_groups[0]["lr"]

    def train_minibatch(self, mini_batch: MiniBatch, *, step: int | None = None) -> dict[str, float]:
        """One optimizer step on this rank's micro-batches; the metrics are those of the global batch, equal on every rank.

        `step` is the policy version that is being trained, for the age of tokens; null (supervised data has no versions) leaves it out.
        Raises NotFiniteError for a NaN or infinite loss or gradient, before anything is changed.
        """
        started = time.perf_counter()
        where = f"optimizer step {self.updates}"
        stats = self.accumulate_gradients(mini_batch, step=step)
        metrics = self._reduce(stats)
        if not math.isfinite(metrics["loss/total"]):
            raise NotFiniteError(f"{where}: the loss is {metrics['loss/total']}; lower optim.lr, and look at the last metrics")
        computed = time.perf_counter()
        metrics["optim/grad_norm"] = clip_gradients(self.parameters, self.max_norm, where)
        lr = learning_rate(self.updates, self.peak_lr, self.schedule, self.total_updates)
        metrics["optim/lr"] = set_learning_rate(self.optimizer, lr / self.peak_lr if self.peak_lr else 0.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        metrics["time/forward_backward"] = computed - started
        metrics["time/optimizer"] = time.perf_counter() - computed
        return metrics

    def accumulate_gradients(self, mini_batch: MiniBatch, *, step: int | None = None) -> Stats:
        """Forward and backward of all of this rank's micro-batches; gradients add to what is there. This rank's share of the stats."""
        stats = Stats()
        for micro_batch in mini_batch.micro_batches[self.rank]:
            inputs = self._inputs(micro_batch)
            logp, entropy = self.model(inputs.layout, inputs.index, inputs.labels, inputs.temperature)
            tokens = TokenBatch(
                logp=logp,
                old_logp=inputs.inference_logp,  # the proximal policy is the one that sampled
                inference_logp=inputs.inference_logp,
                entropy=entropy,
                advantages=inputs.advantages,
                rollout_ids=inputs.rollout_ids,
                rollout_lengths=inputs.rollout_lengths,
            )
            loss, more = self.objective(tokens, mini_batch.num_loss_tokens, mini_batch.num_sequences)
            if step is not None:
                _add_lag(more, step - inputs.versions, mini_batch.num_loss_tokens)
            loss.backward()
            stats.add(more)
        return stats

    def score(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """(logp [N], entropy [N]) of a micro-batch's trainable tokens in its order, without gradient."""
        inputs = self._inputs(micro_batch)
        with torch.no_grad():
            return self.model(inputs.layout, inputs.index, inputs.labels, inputs.temperature)

    def _inputs(self, micro_batch: MicroBatch) -> _Inputs:
        m, device = micro_batch, self.device
        layout = build_layout(m.token_ids, m.cu_seqlens, m.loss_mask, self.model.layout_kind(device), device)

        def trainable(array, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(array[m.loss_mask]).to(device=device, dtype=dtype)

        return _Inputs(
            layout=layout,
            index=trainable(layout.where, torch.int64),
            labels=trainable(m.labels, torch.int64),
            temperature=trainable(m.temperature, torch.float32),
            inference_logp=trainable(m.inference_logprobs, torch.float32),
            advantages=trainable(m.advantages, torch.float32),
            rollout_ids=trainable(m.rollout_ids, torch.int64),
            rollout_lengths=torch.from_numpy(m.rollout_lengths).to(device=device, dtype=torch.int64),
            versions=trainable(m.versions, torch.int64),
        )

    def _reduce(self, stats: Stats) -> dict[str, float]:
        """Add the sums and take the largest of the maxima over all ranks."""
        sums, maxima = torch.stack(list(stats.sums.values())), torch.stack(list(stats.maxima.values()))
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(sums)
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        return finish(dict(zip(stats.sums, sums.tolist(), strict=True)), dict(zip(stats.maxima, maxima.tolist(), strict=True)))


def _add_lag(stats: Stats, lag: Tensor, num_loss_tokens: int) -> None:
    """Age of the trained tokens, lag [N] in policy versions."""
    stats.sums["off_policy/lag_mean"] = lag.sum().double() / max(num_loss_tokens, 1)
    stats.maxima["off_policy/lag_max"] = (
        lag.max().double() if len(lag) else torch.tensor(-torch.inf, dtype=torch.float64, device=lag.device)
    )


def merge_metrics(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of the optimizer steps of one batch, one record: `…_max` and `…_min` keep the extreme, `time/…` adds up, the rest is a mean."""
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
