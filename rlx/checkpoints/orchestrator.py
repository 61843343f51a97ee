"""The orchestrator's part of a checkpoint: what it was going to do next, as of the moment when a step's batch had been handed out.

The trainer decides which steps get a checkpoint, when the orchestrator is steps ahead already. So the orchestrator remembers its state
at the end of each of its last steps (references, no copies of rollouts), and writes the one that is asked for.
Knows folders; what the state holds is the business of those that give it, a record that the codec can write.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from rlx import codec
from rlx.checkpoints.folders import ORCHESTRATOR, being_written, sync
from rlx.paths import RunPaths, atomic
from rlx.waiting import Preempted

STATE = "state.rlx"
POLL = 0.05  # seconds between two looks for a checkpoint that is being written

T = TypeVar("T")


class Snapshots:
    """The states of the last steps. `take` on the event loop, `answer` in a thread."""

    def __init__(self, paths: RunPaths, keep: int) -> None:
        """`keep`: states remembered; the trainer may be so many steps behind when it asks."""
        self.paths, self.keep = paths, keep
        self._states: dict[int, Any] = {}
        self._synced = 0  # steps whose records are known to be on the disk
        self._answered: set[int] = set()  # steps whose checkpoints have the orchestrator's part

    async def keep_answering(self, recorded: Callable[[], Awaitable[int]]) -> None:
        """Add the orchestrator's part to every checkpoint that the trainer writes. Raises Preempted when the trainer has left.

        `recorded` returns the last step whose records are in their files: a checkpoint comes after the records of the steps before it.
        """
        while not self.paths.preempted.exists():
            if any(being_written(self.paths)):
                last = await recorded()
                self._answered.update(await asyncio.to_thread(self.answer, last + 1))
            await asyncio.sleep(POLL)
        raise Preempted

    async def answered_for(self, step: int) -> None:
        """Return when the checkpoint of `step` has the orchestrator's part."""
        while step not in self._answered:
            await asyncio.sleep(POLL)

    def take(self, step: int, state: Any) -> None:
        """Remember the state after the batches of `step` steps, a record. Its parts must not change any more."""
        self._states[step] = state
        for old in [number for number in self._states if number <= step - self.keep]:
            self._states.pop(old)

    def answer(self, last: int | None = None) -> list[int]:
        """Write the state into every checkpoint that waits for it, those of steps after `last` aside; returns their steps.

        Raises RuntimeError when the state that is asked for is not remembered, OSError when it cannot be written,
        CodecError when it holds what a file cannot.
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
                    out.writelines(codec.encode(state))
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


def read_state(checkpoint: Path, kind: type[T]) -> T:
    """The state in a checkpoint, a record of type `kind`. Raises ValueError when there is none, or none that can be read."""
    file = checkpoint / ORCHESTRATOR / STATE
    if not file.exists():
        raise ValueError(
            f"{checkpoint} has no part of an orchestrator ({ORCHESTRATOR}/{STATE}): it was written by a replay, or by an earlier rlx; "
            "go on from a checkpoint of the run itself"
        )
    try:
        return codec.decode(bytearray(file.read_bytes()), kind)
    except codec.CodecError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
