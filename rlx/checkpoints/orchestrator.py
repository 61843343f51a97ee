"""The orchestrator's part of a checkpoint: what it was going to do next, as of the moment when a step's batch had been handed out.

The trainer decides which steps get a checkpoint, when the orchestrator is steps ahead already. So the orchestrator remembers its state
at the end of each of its last steps (references, no copies of rollouts), and writes the one that is asked for.
Knows folders and pickles; what the state holds is the business of those that give it.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlx.checkpoints.folders import ORCHESTRATOR, being_written, sync
from rlx.paths import RunPaths, atomic

STATE = "state.pkl"

State = Mapping[str, Any]


class Snapshots:
    """The states of the last steps. `take` on the event loop, `answer` in a thread."""

    def __init__(self, paths: RunPaths, keep: int) -> None:
        """`keep`: states remembered; the trainer may be so many steps behind when it asks."""
        self.paths, self.keep = paths, keep
        self._states: dict[int, State] = {}
        self._synced = 0  # steps whose records are known to be on the disk

    def take(self, step: int, state: State) -> None:
        """Remember the state after the batches of `step` steps. Its parts must not change any more."""
        self._states[step] = state
        for old in [number for number in self._states if number <= step - self.keep]:
            self._states.pop(old)

    def answer(self, last: int | None = None) -> list[int]:
        """Write the state into every checkpoint that waits for it, those of steps after `last` aside; returns their steps.

        Raises RuntimeError when the state that is asked for is not remembered, OSError when it cannot be written.
        """
        answered = []
        for step, folder in being_written(self.paths):
            file = folder / ORCHESTRATOR / STATE
            if file.exists() or (last is not None and step > last):
                continue
            if (state := self._states.get(step)) is None:
                raise RuntimeError(f"the trainer asks for the state after step {step}; remembered are those of {sorted(self._states)}")
            self._sync_records(step)
            try:
                with atomic(file) as temporary, temporary.open("wb") as out:
                    pickle.dump(state, out, protocol=pickle.HIGHEST_PROTOCOL)
                    out.flush()
                    os.fsync(out.fileno())  # on this machine's disk before the trainer, maybe on another, marks the checkpoint complete
            except FileNotFoundError:  # the trainer gave the checkpoint up meanwhile
                if folder.exists():
                    raise
                continue
            answered.append(step)
        return answered

    def _sync_records(self, step: int) -> None:
        """Have what was recorded of the steps before `step` survive the machine, as the checkpoint does."""
        files = [file for s in range(self._synced, step) for file in (self.paths.rollouts_of(s), self.paths.recorded_of(s))]
        for path in (self.paths.metrics, *files, self.paths.rollouts, self.paths.recorded):
            if path.exists():
                sync(path)
        self._synced = step


def read_state(checkpoint: Path) -> State:
    """The state in a checkpoint. Only load checkpoints of runs that you trust: it is a pickle.

    Raises ValueError when there is none.
    """
    if not (checkpoint / ORCHESTRATOR / STATE).exists():
        raise ValueError(f"{checkpoint} has no part of an orchestrator: it was written by a replay; go on from one of the run itself")
    return pickle.loads((checkpoint / ORCHESTRATOR / STATE).read_bytes())
