"""Displays a shared trainer (`trainer.max_concurrent_runs`): how many common steps it has made, and the runs in its directory."""

from __future__ import annotations

import time
from typing import Any

from rlx.cli.console import Console
from rlx.cli.display import LINE_INTERVAL, clock, tell
from rlx.runs.members import members_in
from rlx.runs.status import read_status


class SharedConsole(Console):
    """Displays a shared trainer."""

    def _head(self) -> list[Any]:
        return [self._line()] if self.history.begun else []

    def _lines(self, final: bool = False) -> None:
        if self.history.steps <= self.history.first:
            self._new_phases()
            return
        now = time.time()
        if self.history.steps > self._printed_step and (final or now - self._printed_at >= LINE_INTERVAL):
            self._printed_step, self._printed_at = self.history.steps, now
            tell(f"[{clock(now - self.started)}] {self._line()}")

    def _line(self) -> str:
        runs = self.history.last("perf/runs", "trainer") or 0
        return f"{self.history.steps} common steps   the last one of {runs:.0f} run{'s' * (runs != 1)}"

    def summary(self, exit_code: int) -> str:
        """The closing text of a shared trainer that ended with `exit_code`."""
        status = self.run.status
        state = "ended" if status is None else status.state
        lines = ["", f"{self.paths.root.name}: {state} after {self.history.steps} common steps, {clock(time.time() - self.started)}"]
        for name in members_in(self.paths.root):
            of_run = read_status(self.paths.member(name.removeprefix("run_")))
            if of_run is not None:
                lines.append(f"  {name:<9} {of_run.state}, {of_run.step} of {of_run.max_steps} steps")
        return "\n".join([*lines, *self._kernels(), f"  run       {self.paths.root}", *(self._unfinished("train") if exit_code else ())])
