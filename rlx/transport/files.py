"""Step batches through files: the orchestrator writes `batches/step_000012.batch`, the trainer reads it and deletes it.

A file appears whole (temporary name, then rename), so its existence is the message. Knows nothing of what a batch means.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx import wire
from rlx.paths import RunPaths, atomic
from rlx.types import StepBatch
from rlx.waiting import wait_for


class BatchWriter:
    """The orchestrator's end."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths

    def send(self, batch: StepBatch) -> None:
        """Make the batch appear. A batch of the same step that was not consumed is replaced."""
        with atomic(self.paths.batch_of(batch.step)) as temporary, temporary.open("wb") as file:
            file.writelines(wire.encode(batch))


class BatchReader:
    """The trainer's end; every rank may have one."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths

    def receive(self, step: int, timeout: float, tick: Callable[[], None] | None = None) -> StepBatch:
        """Wait for the batch of `step` and read it; it stays until `done`.

        `timeout` in seconds, `tick` is called while waiting. Raises WaitTimeout, or ValueError for a damaged file.
        """
        path = self.paths.batch_of(step)
        wait_for(path.exists, f"the batch of step {step} ({path}); see the orchestrator's log", timeout, poll=0.002, tick=tick)
        buffer = bytearray(path.stat().st_size)  # a bytearray, so that the arrays are writable and torch takes them as they are
        with path.open("rb") as file:
            file.readinto(buffer)
        batch = wire.decode(buffer)
        assert batch.step == step, f"{path} holds the batch of step {batch.step}"
        return batch

    def done(self, step: int) -> None:
        """Delete the batch. Call it once every rank has received it."""
        self.paths.batch_of(step).unlink(missing_ok=True)
