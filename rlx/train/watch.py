"""What a rank of the trainer does beside training: it says that it lives, and hears that the run is to give way.

Rank 0 alone looks for the notice; the others hear of it from rank 0, so that all leave after the same step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from rlx.heartbeat import Heartbeat
from rlx.paths import RunPaths, listed
from rlx.waiting import Preempted

if TYPE_CHECKING:  # so that a role can watch before torch is loaded
    from rlx.parallel.mesh import Mesh

log = logging.getLogger("rlx.trainer")

LOOK = 0.25  # seconds between two looks for the notice while waiting


class Watch:
    """Of one rank."""

    def __init__(self, paths: RunPaths, name: str | None, *, first: bool, grace: float) -> None:
        """`name`: of this process in the plan, None where rank 0 speaks for it; `first`: whether this is rank 0; `grace`: seconds after the
        notice in which a step may end."""
        self.paths, self.first, self.grace = paths, first, grace
        self.heartbeat = Heartbeat(paths, name) if name is not None else None
        self.checks: list[Callable[[], None]] = []  # of what goes on in threads; each may raise what went wrong there
        self._noticed = False
        self._looked = -LOOK

    def beat(self, phase: str, step: int | None = None) -> None:
        """Say what is being done now."""
        if self.heartbeat is not None:
            self.heartbeat.beat(phase, step)

    def beat_on(self) -> None:
        """While waiting: still alive, still the same phase. Raises what went wrong beside it."""
        if self.heartbeat is not None:
            self.heartbeat.beat(self.heartbeat.phase)
        for check in self.checks:
            check()

    def working(self, phase: str, step: int | None = None) -> AbstractContextManager[None]:
        """Around what takes long and cannot beat: a thread does."""
        return self.heartbeat.during(phase, step) if self.heartbeat is not None else nullcontext()

    def waiting(self) -> AbstractContextManager[None]:
        """The same, in the phase that it is in."""
        return self.working(self.heartbeat.phase) if self.heartbeat is not None else nullcontext()

    def tick(self) -> None:
        """While waiting where it can be left: raises Preempted on rank 0 when the run is to give way."""
        self.beat_on()
        if self.noticed():
            raise Preempted

    def noticed(self, every: float = LOOK) -> bool:
        """Whether the run is to give way, on rank 0; False elsewhere. Asks the file system at most `every` so many seconds."""
        if self.first and not self._noticed and time.monotonic() - self._looked >= every:
            self._noticed = listed(self.paths.preempt)
            self._looked = time.monotonic()
        return self._noticed

    def give_way_with(self, mesh: Mesh) -> None:
        """Between two steps: raises Preempted on every rank when the run is to give way."""
        if mesh.any(self.noticed(every=0.0)):
            raise Preempted

    def give_up_with(self, mesh: Mesh) -> None:
        """Within a step of which nothing is applied: raises Preempted on every rank when the notice is older than the grace."""
        if mesh.any(self.noticed(every=0.0) and time.time() - self.paths.preempt.stat().st_mtime > self.grace):
            log.info("this step is given up: the run was told to give way more than launcher.grace=%g s ago", self.grace)
            raise Preempted
