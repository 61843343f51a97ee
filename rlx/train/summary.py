"""What the run's summary shows of the trainer, because few users read its log: `kernels.json`."""

from __future__ import annotations

import json
import logging

from rlx.parallel.mesh import Mesh
from rlx.paths import RunPaths, write_text
from rlx.train.step import PolicyTrainer

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
