"""A trainer rank's heartbeats, and its response to a preemption notice.

Only rank 0 looks for the notice. It tells the others, so that all ranks leave after the same step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from rlx.heartbeat import Heartbeat
from rlx.paths import RunPaths, listed
from rlx.polling import Preempted

if TYPE_CHECKING:  # so that a role can send heartbeats before torch is loaded
    from rlx.parallel.mesh import Mesh

log = logging.getLogger("rlx.trainer")

POLL_SECONDS = 0.25  # seconds between two looks for the notice while waiting


class Watch(Heartbeat):
    """Heartbeats and preemption of one rank."""

    working = Heartbeat.during  # long work that cannot send heartbeats: a thread sends them

    def __init__(self, paths: RunPaths, name: str, *, first: bool, grace: float) -> None:
        """`name` is this process's name in the plan. `first` marks rank 0. `grace` is how many seconds after the notice a step may still
        end."""
        super().__init__(paths, name)
        self.first, self.grace = first, grace
        self.checks: list[Callable[[], None]] = []  # of background threads; each raises the error of its thread
        self._noticed: float | None = None  # when the notice was first seen, by this host's own clock
        self._looked = -POLL_SECONDS

    def heartbeat(self) -> None:
        """Report the same phase again while waiting. Raises errors of background threads."""
        self.beat(self.phase)
        for check in self.checks:
            check()

    def progressed(self) -> None:
        """Like `heartbeat`, after a part of the phase's work is done."""
        self.progress += 1
        self.heartbeat()

    def waiting(self) -> AbstractContextManager[None]:
        """Like `working`, in the current phase."""
        return self.during(self.phase)

    def tick(self) -> None:
        """Call it while waiting, where leaving is safe. Raises Preempted on rank 0 if the run is preempted."""
        self.heartbeat()
        if self.preemption_requested():
            raise Preempted

    def preemption_requested(self, every: float = POLL_SECONDS) -> bool:
        """Whether the run is preempted, on rank 0; False on other ranks. Looks at most once in `every` seconds."""
        if self.first and self._noticed is None and time.monotonic() - self._looked >= every:
            self._looked = time.monotonic()
            if listed(self.paths.preempt):
                self._noticed = self._looked
        return self._noticed is not None

    def raise_if_preempted(self, mesh: Mesh) -> None:
        """Call it between two steps: raises Preempted on every rank if the run is preempted."""
        if mesh.any(self.preemption_requested(every=0.0)):
            raise Preempted

    def raise_if_grace_over(self, mesh: Mesh) -> None:
        """Call it within a step, before its update: raises Preempted on every rank if rank 0 saw the notice longer than the grace ago."""
        if mesh.any(self.preemption_requested(every=0.0) and self._noticed is not None and time.monotonic() - self._noticed > self.grace):
            log.info("giving up this step: the preemption notice was seen more than launcher.grace=%g s ago", self.grace)
            raise Preempted
