"""Step batches through files: the orchestrator writes `batches/step_000012.batch`, the trainer reads it and deletes it.

What was sent can be recorded, in the same bytes compressed, and read again in its place: `recorded/step_000012.batch.zst`.
A file appears whole (temporary name, then rename), so its existence is the message. Knows nothing of what a batch means.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import zstandard

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


class Batches(Protocol):
    """Where a trainer has its batches from."""

    def receive(self, step: int, timeout: float, tick: Callable[[], None] | None = None) -> StepBatch: ...

    def done(self, step: int) -> None: ...


def record(paths: RunPaths, batch: StepBatch) -> None:
    """Keep a batch for a replay. Compressing takes a moment: call it in a thread."""
    # Labels repeat the token ids, one array further on: only a long window finds that in large batches.
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=25, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    with atomic(paths.recorded_of(batch.step)) as temporary, compressor.stream_writer(temporary.open("wb")) as stream:
        for piece in wire.encode(batch):
            stream.write(piece)


class RecordedBatches:
    """The batches that another run has recorded, in their order and packing."""

    def __init__(self, paths: RunPaths) -> None:
        """`paths` of the run that recorded them."""
        self.paths = paths

    def receive(self, step: int, timeout: float = 0.0, tick: Callable[[], None] | None = None) -> StepBatch:
        """The batch of `step`. Raises FileNotFoundError when it was not recorded, ValueError for a damaged file."""
        with self.paths.recorded_of(step).open("rb") as file:
            try:
                content = bytearray(zstandard.ZstdDecompressor().stream_reader(file).read())
            except zstandard.ZstdError as error:
                raise ValueError(f"{self.paths.recorded_of(step)} is damaged: {error}") from error
        return wire.decode(content)

    def done(self, step: int) -> None:
        """Nothing: they may be replayed again."""


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
