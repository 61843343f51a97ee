"""What the run's summary shows of the trainer, because few users read its log: `kernels.json`."""

from __future__ import annotations

import json
import logging

from rlx.models.compiled import about_eager_rows, eager_again
from rlx.parallel.mesh import Mesh
from rlx.paths import RunPaths, write_text
from rlx.train.step import PolicyTrainer

log = logging.getLogger("rlx.trainer")


class Summary:
    """The kernels that `auto` chose, and warnings, of memory, of the objective and of compiled layers. Rank 0 writes them."""

    def __init__(self, paths: RunPaths, mesh: Mesh, trainer: PolicyTrainer, warning: str | None = None) -> None:
        """`warning`: one that is known already."""
        self.paths, self.mesh, self.trainer = paths, mesh, trainer
        self.facts = {"logprob": trainer.model.logprob_backend, "layers": trainer.model.liger}
        if warning is not None:
            self.facts["warning"] = warning
        self._write()

    def after_step(self, step: int) -> None:
        """Add each warning once: of the objective, and of compiled layers. All ranks call it: each compiles for rows of its own."""
        model = self.trainer.model
        eager = about_eager_rows(model) if model.compiled and self.mesh.any(eager_again()) else None
        for warning in (self.trainer.warning, eager) if self.mesh.first else ():
            said = self.facts.get("warning", "")
            if warning is not None and warning not in said:
                self.facts["warning"] = f"{said}; {warning}" if said else warning
                log.warning("step %d: %s", step, warning)
                self._write()

    def _write(self) -> None:
        if self.mesh.first:
            write_text(self.paths.kernels, json.dumps(self.facts) + "\n")
