"""Keeps the log-probabilities and entropies that a rank's forward passes compute, and writes them beside the recorded batch."""

from __future__ import annotations

from torch import Tensor

from rlx.config.schema import Config, TrainingRoot
from rlx.data.scores import scores_of, write_scores
from rlx.parallel.mesh import Mesh
from rlx.paths import RunPaths
from rlx.train.step import PolicyTrainer
from rlx.types import MicroBatch, StepBatch


class ScoreKeeper:
    """Listens to a trainer. Does nothing in a run that does not record its batches."""

    def __init__(self, cfg: TrainingRoot, paths: RunPaths, mesh: Mesh, trainer: PolicyTrainer) -> None:
        self.paths, self.mesh = paths, mesh
        self.keeps = isinstance(cfg, Config) and cfg.orchestrator.save_batches and cfg.plays and not cfg.trained_elsewhere and mesh.leads
        self._rows: dict[int, tuple[MicroBatch, Tensor, Tensor]] = {}  # on the device until the step is done: no row waits for a copy
        if self.keeps:
            trainer.after_forward = self._add

    def _add(self, row: MicroBatch, logp: Tensor, entropy: Tensor) -> None:
        self._rows.setdefault(id(row), (row, logp.detach(), entropy.detach()))  # of the first pass over the batch

    def write(self, batch: StepBatch) -> None:
        """Write the scores of a batch that was trained on."""
        rows, self._rows = self._rows.values(), {}
        if self.keeps:
            on_host = [(row, logp.float().cpu().numpy(), entropy.float().cpu().numpy()) for row, logp, entropy in rows]
            write_scores(self.paths, scores_of(batch, on_host), self.mesh.data_rank)
