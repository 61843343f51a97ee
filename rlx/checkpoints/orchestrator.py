"""The orchestrator's part of a checkpoint: its state at the moment when it had handed out a step's batch.

The trainer decides which steps get a checkpoint, and by then the orchestrator is steps ahead. So the orchestrator keeps its states at the
end of its last steps (references, no copies of rollouts) and writes the requested one. A state is any record that the codec can write.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from rlx import codec
from rlx.checkpoints.folders import ORCHESTRATOR, being_written, sync
from rlx.paths import RunPaths, atomic, listed
from rlx.polling import Preempted

STATE = "state.rlx"
POLL_SECONDS = 0.05  # seconds between two looks for a checkpoint being written

T = TypeVar("T")


class Snapshots:
    """The states of the last steps. `take` runs on the event loop, `answer` in a thread."""

    def __init__(self, paths: RunPaths, keep: int) -> None:
        """`keep` is the number of states to remember: how many steps the trainer may be behind when it asks."""
        self.paths, self.keep = paths, keep
        self._states: dict[int, Any] = {}
        self._synced = 0  # steps whose records are synced to disk
        self._answered: set[int] = set()  # steps whose checkpoints have the orchestrator's part

    async def keep_answering(self, recorded: Callable[[], Awaitable[int]]) -> None:
        """Add the orchestrator's part to every checkpoint that the trainer writes. Raises Preempted once the trainer has left.

        `recorded` returns the last step whose records are written, because a checkpoint must follow the records of the steps before it.
        """
        while not listed(self.paths.preempted):
            if any(being_written(self.paths)):
                last = await recorded()
                self._answered.update(await asyncio.to_thread(self.answer, last + 1))
            await asyncio.sleep(POLL_SECONDS)
        raise Preempted

    async def answered_for(self, step: int) -> None:
        """Return when the checkpoint of `step` has the orchestrator's part."""
        while step not in self._answered:
            await asyncio.sleep(POLL_SECONDS)

    def take(self, step: int, state: Any) -> None:
        """Remember the state, a record, after the batches of `step` steps. Its parts must not change any more."""
        self._states[step] = state
        for old in [number for number in self._states if number <= step - self.keep]:
            self._states.pop(old)

    def answer(self, last: int | None = None) -> list[int]:
        """Write the state into every checkpoint that waits for it, except steps after `last`. Returns the answered steps.

        Raises RuntimeError if the requested state is no longer remembered, OSError if it cannot be written, and CodecError if the codec
        cannot write it.
        """
        answered = []
        for step, folder in being_written(self.paths):
            file = folder / ORCHESTRATOR / STATE
            if file.exists() or (last is not None and step > last):
                continue
            if (state := self._states.get(step)) is None:
                if not listed(folder):  # the trainer has completed or abandoned it since the folders were listed
                    continue
                raise RuntimeError(f"the trainer asks for the state after step {step}, but only those of {sorted(self._states)} are kept")
            self._sync_records(step)
            try:
                file.parent.mkdir(exist_ok=True)  # but not the checkpoint's folder, which the trainer may have renamed or deleted
                with atomic(file, parents=False) as temporary, temporary.open("wb") as out:
                    out.write(codec.encode(state))
                    out.flush()
                    os.fsync(out.fileno())  # before the trainer, perhaps on another machine, marks the checkpoint complete
            except FileNotFoundError:  # the trainer abandoned the checkpoint meanwhile
                if folder.exists():
                    raise
                continue
            answered.append(step)
        return answered

    def _sync_records(self, step: int) -> None:
        """Sync the records of the steps before `step` to disk, so that they survive a crash of the machine like the checkpoint."""
        files = [file for s in range(self._synced, step) for file in (self.paths.rollouts_of(s), self.paths.recorded_of(s))]
        for path in (self.paths.metrics, *files, self.paths.rollouts, self.paths.recorded):
            if path.exists():
                sync(path)
        self._synced = step


def read_state(checkpoint: Path, kind: type[T]) -> T:
    """The state in a checkpoint, a record of type `kind`. Raises ValueError if it is missing or unreadable."""
    file = checkpoint / ORCHESTRATOR / STATE
    if not file.exists():
        raise ValueError(
            f"{checkpoint} has no orchestrator state ({ORCHESTRATOR}/{STATE}): it was written by a replay, or by an earlier rlx; "
            "continue from a checkpoint of the run itself"
        )
    try:
        return codec.decode(bytearray(file.read_bytes()), kind)
    except codec.CodecError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
