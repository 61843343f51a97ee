"""What each process is doing now, in one small file per process.

Each file is rewritten when the phase changes, and otherwise at most twice a second. The console shows the phases while a run starts. The
supervisor treats a process as hung when its file is too old. A waiter does not time out while a process reports unbounded work
(`AtWork`), such as a download.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlx.paths import RunPaths, arrived, listed, write_text
from rlx.polling import wait_for

INTERVAL = 0.5  # seconds between two writes of an unchanged phase
ABSENT = 10.0  # seconds without a look after which the looker was stopped itself, and perhaps the others with it
SILENT = 20.0  # seconds without a heartbeat after which a process no longer counts as at work
WAITING_FOR_MODEL = "waiting for the initial model"
EVALUATING = "evaluating"  # prefix of the orchestrator's phase when training waits for an evaluation
SERVING = "serving"  # phase of a server that answers requests
FETCHING = "fetching"  # prefix of the phase of a process that downloads a model


@dataclass
class Heartbeat:
    """Writes the heartbeats of this process. Call `beat(phase)` wherever the main loop makes progress or waits on purpose."""

    paths: RunPaths
    name: str  # the process's name in the plan: "trainer", "inference_0", …
    phase: str = ""
    since: float = 0.0
    progress: int = 0  # what was done within this phase (micro-batches, tokens); it changes as long as the process gets on
    _written: float = field(default=0.0, repr=False)

    def beat(self, phase: str, step: int | None = None) -> None:
        """Report that the process is alive and what it does (`loading model`, `waiting for batch 12`)."""
        now = time.time()
        if phase != self.phase:
            self.phase, self.since = phase, now
        elif now - self._written < INTERVAL:
            return
        self._written = now
        record = {
            "name": self.name,
            "pid": os.getpid(),
            "phase": phase,
            "since": self.since,
            "step": step,
            "progress": self.progress,
            "time": now,
        }
        with contextlib.suppress(OSError):  # writers of important files (checkpoints, metrics) report a full disk
            write_text(self.path, json.dumps(record))

    @contextlib.contextmanager
    def during(self, phase: str, step: int | None = None, limit: float = math.inf) -> Iterator[None]:
        """Beat from a thread during a call that cannot beat, for at most `limit` seconds: a call that takes longer counts as hung.

        Without a limit, the call must end by itself when it makes no progress (a download).
        """
        ended = threading.Event()
        last = time.monotonic() + limit

        def beat_on() -> None:
            while not ended.wait(INTERVAL) and time.monotonic() < last:
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
    """Whether a process currently reports one of the given phases. Cheap to call often."""

    def __init__(self, paths: RunPaths, name: str, phases: tuple[str, ...] = ("",)) -> None:
        """`name`: the process's name in the plan. `phases`: the phase must start with one of these prefixes."""
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
                beat = json.loads(self._file.read_text()) if listed(self._file) else None
            except (OSError, ValueError):
                beat = None
            if beat is None:
                return False
            if beat["time"] != self._seen:  # only compared with each other: it may be another machine's clock
                self._seen, self._since = beat["time"], now
            self._busy = beat["phase"].startswith(self._phases)
        return self._busy and now - self._since < SILENT


class Ages:
    """How long ago the heartbeats of other processes changed, by this process's own clock: the clocks of two hosts may differ.

    Time in which this process was stopped itself does not count: a job that is suspended and goes on has no hung process.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float]] = {}  # name -> time in the newest beat, and when it was first seen (monotonic seconds)
        self._looked: float | None = None  # monotonic seconds
        self._stopped: list[tuple[float, float]] = []  # when this process went on after it was stopped, and for how long that was

    def look(self, beats: Mapping[str, Mapping[str, Any]], now: float) -> dict[str, float]:
        """Seconds since each process's newest beat was first seen. `now`: monotonic seconds."""
        if self._looked is not None and (gap := now - self._looked) > ABSENT:
            self._seen = {name: (newest, since + gap) for name, (newest, since) in self._seen.items()}
            self._stopped.append((now, gap))
        self._looked = now
        for name, beat in beats.items():
            if name not in self._seen or self._seen[name][0] != beat["time"]:
                self._seen[name] = (beat["time"], now)
        return {name: now - self._seen[name][1] for name in beats}

    def since(self, moment: float) -> float:
        """Seconds from a moment (monotonic) to the last look, as for a process that started then and has not beaten yet."""
        assert self._looked is not None, "look first"
        return self._looked - moment - sum(max(0.0, min(gap, went_on - moment)) for went_on, gap in self._stopped)


def in_phase(beat: Mapping[str, Any], age: float) -> float:
    """Seconds since a process entered the phase of its newest beat. `age`: seconds since that beat (`Ages`)."""
    return beat["time"] - beat["since"] + age


def read_heartbeats(paths: RunPaths) -> dict[str, dict]:
    """All heartbeats of a run, by process name. Skips unreadable files."""
    found = {}
    for path in filter(Path.is_file, sorted(paths.heartbeats.glob("*.json"))):
        try:
            found[path.stem] = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
    return found


def wait_for_model(paths: RunPaths, timeout: float, tick: Callable[[], None], *, untrained: bool = False) -> str:
    """Folder or hub name of the initial model. Waits until it exists, for at most `timeout` seconds in which `prepare` is not at work.

    `tick` is called at every poll. `untrained`: before its warm start is good enough. Raises WaitTimeout.
    """

    def look() -> bytes | None:
        found = arrived(paths.initial_model)
        return str(paths.untrained_model).encode() if found is None and untrained and listed(paths.untrained_model) else found

    name = wait_for(look, f"the initial model ({paths.initial_model})", timeout, tick=tick, excused=AtWork(paths, "prepare"))
    return name.decode().strip()
