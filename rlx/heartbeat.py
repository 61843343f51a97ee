"""What each role is doing right now, in one small file per role, rewritten at most twice a second.

The console shows it while things start; the supervisor takes a role whose file grows old for hung.
Knows the run directory only.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from rlx.paths import RunPaths, write_text

INTERVAL = 0.5  # seconds between two writes of an unchanged phase


@dataclass
class Heartbeat:
    """Call `beat(phase)` wherever the main loop makes progress or waits knowingly."""

    paths: RunPaths
    name: str  # the process's name in the plan: "trainer", "inference_0", …
    phase: str = ""
    since: float = 0.0
    _written: float = field(default=0.0, repr=False)

    def beat(self, phase: str, step: int | None = None) -> None:
        """Say what is being done (`loading model`, `waiting for batch 12`) and that the process is alive."""
        now = time.time()
        if phase != self.phase:
            self.phase, self.since = phase, now
        elif now - self._written < INTERVAL:
            return
        self._written = now
        record = {"name": self.name, "pid": os.getpid(), "phase": phase, "since": self.since, "step": step, "time": now}
        with contextlib.suppress(OSError):  # a full disk is for those to say whose files matter: a checkpoint, the metrics
            write_text(self.path, json.dumps(record))

    @property
    def path(self) -> Path:
        return self.paths.heartbeats / f"{self.name}.json"


def read_heartbeats(paths: RunPaths) -> dict[str, dict]:
    """All heartbeats of a run by process name; files that are being replaced are skipped."""
    found = {}
    for path in sorted(paths.heartbeats.glob("*.json")):
        try:
            found[path.stem] = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
    return found
