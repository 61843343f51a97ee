"""The optimizer steps of several runs on common rows: one forward and backward of the model, then each run's own update.

    rows of run 0 ─┐                                      ┌► loss of run 0 ─┐                     ┌► clip, schedule, step of run 0
    rows of run 1 ─┴► one row of the model ─► logp [N] ─┴► loss of run 1 ─┴► sum ─► backward ─┴► clip, schedule, step of run 1

The base model is frozen and an adapter meets its own run's tokens only, so the gradient of the sum is the gradient of each. Each loss is
divided by its run's counts, and each update reads its run's gradients alone: a run learns as it would alone, up to the order of sums.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from rlx.losses.diagnostics import Stats
from rlx.models.layout import build_layout
from rlx.models.lora import without_adapters
from rlx.models.policy import PolicyModel
from rlx.models.shard import free_gathered
from rlx.parallel.mesh import Mesh
from rlx.train.step import Before, Inputs, PolicyTrainer, merge_metrics
from rlx.types import MicroBatch, MiniBatch, RankBatch

Row = Mapping[int, MicroBatch]  # the parts of a row, by slot in ascending order
Outcome = dict[str, float] | Exception  # a run's metrics, or why its update failed


class Together:
    """Trains the adapters of one model. Every rank makes the same calls."""

    def __init__(self, model: PolicyModel, mesh: Mesh) -> None:
        self.model, self.mesh, self.device = model, mesh, mesh.device
        self.before_row: Callable[[], None] = lambda: None  # called before each forward of a row

    def train(
        self, batches: Mapping[int, RankBatch], trainers: Mapping[int, PolicyTrainer], iterations: Mapping[int, int]
    ) -> dict[int, Outcome]:
        """All optimizer steps of one batch of each run, by slot: its mini-batches in order, `iterations` times.

        `batches` come from `rlx.data.packing.pack_together`. Mini-batch j of all runs is trained together, as far as they have one. Returns
        each run's record, as `PolicyTrainer.train_batch` does. A run whose loss or gradient is not finite has the error instead, and its
        adapter stays as it was before that step; the others go on.
        """
        for slot, batch in batches.items():
            trainers[slot].forward_only = []
            for mini_batch in batch.mini_batches:
                for micro_batch in mini_batch.micro_batches:
                    trainers[slot].refuse_what_nobody_uses(micro_batch)
        began = time.perf_counter()
        longest = max(len(batch.mini_batches) for batch in batches.values())
        rows = [_rows(batches, number) for number in range(longest)]
        several = {slot for slot, batch in batches.items() if iterations[slot] * len(batch.mini_batches) > 1}
        before = [self._score_before(each, trainers, several) for each in rows]
        scored = time.perf_counter() - began
        records: dict[int, list[dict[str, float]]] = {slot: [] for slot in batches}
        empty: dict[int, list[dict[str, float]]] = {slot: [] for slot in batches}  # of mini-batches without a trainable token
        failed: dict[int, Outcome] = {}
        for iteration in range(max(iterations[slot] for slot in batches)):
            for number in range(longest):
                minis = {
                    slot: batch.mini_batches[number]
                    for slot, batch in batches.items()
                    if slot not in failed and number < len(batch.mini_batches) and iteration < iterations[slot]
                }
                if not minis:
                    continue
                started = time.perf_counter()
                steps = {slot: batches[slot].step if batches[slot].sampled else None for slot in minis}
                fresh = {slot: not records[slot] for slot in minis}
                stats, broken = self._accumulate(rows[number], before[number], minis, trainers, steps, fresh)
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
                    if fresh[slot]:
                        trainers[slot].warn_of(metrics)
                    (records if mini_batch.trains else empty)[slot].append(metrics)
                for parameter in self.model.parameters():  # of slots without a run in this step
                    parameter.grad = None
        found: dict[int, Outcome] = {}
        for slot in batches:
            found[slot] = failed[slot] if slot in failed else merge_metrics(records[slot] or empty[slot])
            if slot not in failed:
                found[slot]["time/forward_backward"] += scored  # type: ignore[index]
        return found

    def _accumulate(
        self,
        rows: Sequence[Row],
        before: Sequence[Mapping[int, Before]],
        minis: Mapping[int, MiniBatch],
        trainers: Mapping[int, PolicyTrainer],
        steps: Mapping[int, int | None],
        fresh: Mapping[int, bool],
    ) -> tuple[dict[int, Stats], dict[int, Exception]]:
        """Forward and backward of all rows. Returns this rank's share of each run's stats, and the errors of runs whose loss failed."""
        stats = {slot: Stats() for slot in minis}
        broken: dict[int, Exception] = {}
        for row, scores in zip(rows, before, strict=True):
            self.before_row()
            parts = {slot: part for slot, part in row.items() if slot in minis}
            inputs, logps, entropies = self._forward(parts, trainers)
            losses = []
            for slot, part in parts.items():
                trainers[slot].after_forward(part, logps[slot], entropies[slot])
                try:
                    given = (inputs[slot], logps[slot], entropies[slot], scores[slot], minis[slot])
                    loss, more = trainers[slot].loss_of(*given, step=steps[slot], fresh=fresh[slot])
                    if not loss.requires_grad:  # alone, backward would raise
                        raise ValueError("the loss does not depend on the log-probabilities; something in it is detached")
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # a run's own loss may be anybody's code
                    broken[slot] = error
                    losses.append(0.0 * logps[slot].sum())
                    continue
                losses.append(loss.double())
                stats[slot].add(more)
            torch.stack(losses).sum().backward()
            del losses, logps, entropies  # they hold the activations of the row during the next forward
        for slot in minis:
            if self.mesh.any(slot in broken) and slot not in broken:
                broken[slot] = RuntimeError("the loss of this run failed on another rank, whose log says why")
        return stats, broken

    def _forward(self, row: Row, trainers: Mapping[int, PolicyTrainer]) -> tuple[dict[int, Inputs], dict[int, Tensor], dict[int, Tensor]]:
        """Of each part: its inputs, logp [N] and entropy [N]."""
        parts = list(row.values())
        sizes = [len(part.token_ids) for part in parts]
        starts = np.cumsum([0, *sizes])
        layout = build_layout(
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([[0], *(start + part.cu_seqlens[1:] for start, part in zip(starts[:-1], parts, strict=True))]),
            np.concatenate([part.scored for part in parts]),
            self.model.layout_kind(self.device),
            self.device,
            np.concatenate([part.adapters for part in parts]).tolist(),
        )
        where = np.split(layout.where, starts[1:-1])
        inputs = {slot: trainers[slot].inputs(part, own) for (slot, part), own in zip(row.items(), where, strict=True)}
        index, labels, temperature = (
            torch.cat([getattr(each, name) for each in inputs.values()]) for name in ("index", "labels", "temperature")
        )
        logp, entropy = self.model(layout, index, labels, temperature)
        counts = [len(each.index) for each in inputs.values()]
        return inputs, dict(zip(row, logp.split(counts), strict=True)), dict(zip(row, entropy.split(counts), strict=True))

    def _score_before(self, rows: Sequence[Row], trainers: Mapping[int, PolicyTrainer], several: set[int]) -> list[dict[int, Before]]:
        """Scores from before the first update, of each row's parts: by the policy for runs with `several` updates, by the reference."""
        found = []
        for row in rows:
            old = {slot: part for slot, part in row.items() if slot in several and trainers[slot].losses.recomputes}
            compared = {slot: part for slot, part in row.items() if trainers[slot].reference is not None}
            scores: list[Mapping[int, Tensor]] = []
            for parts, context in ((old, nullcontext()), (compared, without_adapters(self.model))):
                if not parts:
                    scores.append({})
                    continue
                self.before_row()
                with torch.no_grad(), context:
                    scores.append(self._forward(parts, trainers)[1])
            found.append({slot: Before(old_logp=scores[0].get(slot), ref_logp=scores[1].get(slot)) for slot in row})
        free_gathered(self.model)  # scoring has no backward, which would free some of the parameters
        return found


def _rows(batches: Mapping[int, RankBatch], number: int) -> list[Row]:
    """The rows of mini-batch `number`, as far as the runs have one."""
    own = {slot: batch.mini_batches[number].micro_batches for slot, batch in sorted(batches.items()) if number < len(batch.mini_batches)}
    return [dict(zip(own, parts, strict=True)) for parts in zip(*own.values(), strict=True)]
