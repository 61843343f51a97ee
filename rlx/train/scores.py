"""Keeps the log-probabilities and entropies that a rank's forward passes compute, and writes them beside the recorded batch."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from rlx.config.schema import TrainingRoot
from rlx.data.packing import Cost, samples_in_rows
from rlx.data.scores import Scored, scores_of, write_scores
from rlx.parallel.mesh import Mesh
from rlx.paths import RunPaths
from rlx.train.step import PolicyTrainer
from rlx.types import MicroBatch, StepBatch

Row = tuple[MicroBatch, Tensor, Tensor]  # with logp [N] and entropy [N] of its scored tokens


class ScoreKeeper:
    """Listens to a trainer. Does nothing in a run that does not record its batches."""

    def __init__(self, cfg: TrainingRoot, paths: RunPaths, mesh: Mesh, trainer: PolicyTrainer, cost: Cost) -> None:
        """`cost`: the one that packs the rows that are trained."""
        self.paths, self.mesh, self.losses, self.tokens, self.cost = paths, mesh, trainer.losses, cfg.micro_batch_tokens, cost
        self.padded = trainer.padded
        self.keeps = cfg.records_scores and mesh.leads
        self._rows: list[Row] = []  # on the device until the step is done, so that no row waits for a copy
        if self.keeps:
            trainer.after_forward = self._add

    def _add(self, row: MicroBatch, logp: Tensor, entropy: Tensor) -> None:
        self._rows.append((row, logp.detach(), entropy.detach()))

    def write(self, batch: StepBatch) -> None:
        """Write the scores of a batch that was trained on, of the first pass over it."""
        rows, self._rows = self._rows, []
        if not self.keeps:
            return
        rank, ranks = self.mesh.data_rank, self.mesh.num_data_ranks
        how: dict[str, Any] = {"tokens": self.tokens, "loss_of": self.losses.loss_of, "cost": self.cost, "padded": self.padded}
        packed = samples_in_rows(batch, rank=rank, ranks=ranks, **how)
        write_scores(self.paths, scores_of(batch, [_sampled(row) for row in rows[: len(packed)]], packed), rank)


def _sampled(row: Row) -> Scored:
    """Without the tokens that only a cross-entropy loss reads."""
    micro_batch, logp, entropy = row
    kept: np.ndarray = micro_batch.loss_mask[micro_batch.scored]
    return logp.float().cpu().numpy()[kept], entropy.float().cpu().numpy()[kept]
