"""What people see of the trainer beside its metrics: `kernels.json` for the run's summary, scores of tokens for `rlx view`."""

from __future__ import annotations

import json
import logging

from torch import Tensor

from rlx.config.schema import Config, TrainingRoot
from rlx.data.scores import write_scores
from rlx.parallel.mesh import Mesh
from rlx.paths import RunPaths, write_text
from rlx.train.step import PolicyTrainer
from rlx.types import MicroBatch, StepBatch

log = logging.getLogger("rlx.trainer")


class Summary:
    """The kernels that `auto` chose, and the objective's warnings. Rank 0 writes them."""

    def __init__(self, paths: RunPaths, mesh: Mesh, trainer: PolicyTrainer) -> None:
        self.paths, self.mesh, self.trainer = paths, mesh, trainer
        self.facts = {"logprob": trainer.model.logprob_backend, "layers": trainer.model.liger}
        self._write()

    def after_step(self, step: int) -> None:
        """Add the objective's warning, once."""
        warning, said = self.trainer.warning, self.facts.get("warning", "")
        if warning is not None and warning not in said:
            self.facts["warning"] = f"{said}; {warning}" if said else warning
            log.log(logging.WARNING if self.mesh.first else logging.DEBUG, "step %d: %s", step, warning)
            self._write()

    def _write(self) -> None:
        if self.mesh.first:
            write_text(self.paths.kernels, json.dumps(self.facts) + "\n")


class ScoreKeeper:
    """Listens to a trainer. Does nothing in a run that does not record its batches."""

    def __init__(self, cfg: TrainingRoot, paths: RunPaths, mesh: Mesh, trainer: PolicyTrainer) -> None:
        self.paths, self.mesh = paths, mesh
        self.keeps = (
            isinstance(cfg, Config)
            and cfg.orchestrator.save_batches
            and cfg.generates_rollouts
            and not cfg.uses_shared_trainer
            and mesh.is_group_leader
        )
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
            write_scores(self.paths, batch, on_host, self.mesh.data_rank)
