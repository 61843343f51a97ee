"""The loss of the policy on rows that are not trained on.

Every rank scores its share of the packed rows, without gradient; the sums are reduced over the ranks. Rank 0 writes a record of
source `val` whose step is the policy version, as evaluations do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import torch

from rlx.data.packing import Cost, pack
from rlx.metrics import MetricsWriter
from rlx.paths import RunPaths
from rlx.train.step import PolicyTrainer, perplexity
from rlx.train.watch import Watch
from rlx.types import StepBatch

log = logging.getLogger("rlx.trainer")


class Validation:
    """One set of held-out samples. Every rank has this object and makes the same calls."""

    def __init__(
        self, trainer: PolicyTrainer, rows: tuple[StepBatch, Mapping[str, float]], tokens: int, cost: Cost, paths: RunPaths, watch: Watch
    ) -> None:
        """`rows`: the samples, the same on every rank, and what was left out of them, on rank 0. `tokens` and `cost`: of packed rows."""
        mesh = trainer.mesh
        self.trainer, self.watch = trainer, watch
        batch, self.left_out = rows
        packed = pack(batch, rank=mesh.data_rank, ranks=mesh.num_data_ranks, tokens=tokens, cost=cost, padded=trainer.padded)
        (self.rows,) = packed.mini_batches
        self.metrics = MetricsWriter(paths.metrics, "val") if mesh.first else None

    def record(self, version: int) -> None:
        """Measure the loss of the present weights, which are policy version `version`, and write it."""
        values = self.measure()
        if self.metrics is not None:
            self.metrics.write(version, {**values, **self.left_out})
        lost = "".join(f", {name} {count:.0f}" for name, count in self.left_out.items() if count)
        log.info("version %d: validation loss %.4f%s", version, values["val/loss"], lost)

    def measure(self) -> dict[str, float]:
        """The loss of the present weights, as metrics."""
        began = time.perf_counter()
        total = torch.zeros((), dtype=torch.float64, device=self.trainer.device)
        for row in self.rows.micro_batches:
            self.watch.progressed()
            logp, _ = self.trainer.score(row)
            total -= logp.double().sum()
        self.trainer.reshard()
        self.trainer.mesh.sum(total)
        loss = float(total) / max(self.rows.num_loss_tokens, 1)
        return {
            "val/loss": loss,
            "val/perplexity": perplexity(loss),
            "val/loss_tokens": self.rows.num_loss_tokens,
            "val/samples": self.rows.num_sequences,
            "time/validation": time.perf_counter() - began,
        }
