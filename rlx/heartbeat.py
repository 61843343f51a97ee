"""What each role is doing right now, in one small file per role, rewritten at most twice a second.

The console shows it while things start; the supervisor takes a role whose file grows old for hung; who waits for a role that says it is
busy with something that takes as long as it takes goes on waiting (`AtWork`).
Knows the run directory only.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rlx.paths import RunPaths, write_text

INTERVAL = 0.5  # seconds between two writes of an unchanged phase
SILENT = 20.0  # seconds after which a process that says nothing is not taken to be at work any more
WAITING_FOR_MODEL = "waiting for the initial model"
FETCHING = "fetching"  # begins the phase of a process that downloads a model


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

    @contextlib.contextmanager
    def during(self, phase: str, step: int | None = None) -> Iterator[None]:
        """Beat from a thread while the caller is in a call that cannot, and that ends by itself when nothing moves (a download)."""
        ended = threading.Event()

        def beat_on() -> None:
            while not ended.wait(INTERVAL):
                self.beat(phase, step)

        self.beat(phase, step)
        thread = threading.Thread(target=beat_on, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    @property
    def path(self) -> Path:
        return self.paths.heartbeats / f"{self.name}.json"


class AtWork:
    """Whether a process says, time and again, that it is in one of some phases. Cheap to ask often."""

    def __init__(self, paths: RunPaths, name: str, phases: tuple[str, ...] = ("",)) -> None:
        """`name`: of the process; `phases`: what its phase must begin with, one of them."""
        self._file = paths.heartbeats / f"{name}.json"
        self._phases = phases
        self._seen: object = None  # the newest beat
        self._since = self._looked = -SILENT  # monotonic seconds: when the newest beat was first seen; when the file was last read
        self._busy = False

    def __call__(self) -> bool:
        now = time.monotonic()
        if now - self._looked >= INTERVAL:
            self._looked = now
            try:
                beat = json.loads(self._file.read_text())
            except (OSError, ValueError):
                return False
            if beat["time"] != self._seen:  # compared, not subtracted from our time: it is the clock of another machine, maybe
                self._seen, self._since = beat["time"], now
            self._busy = beat["phase"].startswith(self._phases)
        return self._busy and now - self._since < SILENT


def read_heartbeats(paths: RunPaths) -> dict[str, dict]:
    """All heartbeats of a run by process name; files that are being replaced are skipped."""
    found = {}
    for path in sorted(paths.heartbeats.glob("*.json")):
        try:
            found[path.stem] = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
    return found
