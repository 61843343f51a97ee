"""The sources of a trainer's batches: one interface, four implementations. The trainer's loop does not know which one it has.

    OrchestratorSource    `batches/step_000012.batch` appears in the run directory and is deleted once received
    RecordedSource        `recorded/step_000012.batch.zst` of another run; any number of ranks may train on it
    SupervisedSource      rows of data sets, mixed and shuffled (`rlx.data.supervised`)
    FakeSource            random tokens of given lengths, for benchmarks

A source gives samples, never rows: every rank packs for itself (`rlx.data.packing`). With several ranks, only rank 0 waits for files and
reads them, and broadcasts the bytes. A file appears whole (temporary name, then rename), so a reader never sees half of it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx import codec
from rlx.heartbeat import EVALUATING, AtWork
from rlx.paths import RunPaths, atomic, listed
from rlx.polling import wait_for
from rlx.types import STREAMS, StepBatch, TrainingSample

if TYPE_CHECKING:  # an orchestrator only sends, so it need not load torch
    from rlx.parallel.mesh import Mesh

Tick = Callable[[], None]


class Source(ABC):
    """Gives every rank the same batch for the same step."""

    own = True  # whether a version that a sample names is this trainer's version of that number. False: it is another model

    @abstractmethod
    def receive(self, step: int, tick: Tick = lambda: None) -> StepBatch:
        """The batch of `step`. `tick` is called while rank 0 waits. If it raises Preempted there, every rank raises it."""

    def done(self, step: int) -> None:  # noqa: B027  (only a source that others fill has anything to clear away)
        """Called when every rank has received the batch of `step`."""

    def report(self, step: int) -> dict[str, float]:
        """What the source knows of the batch of `step`, as metrics; the record of rank 0 gets them."""
        return {}


def send(paths: RunPaths, batch: StepBatch) -> None:
    """The orchestrator's end: write the batch. Replaces a batch of the same step that was not consumed."""
    with atomic(paths.batch_of(batch.step)) as temporary, temporary.open("wb") as file:
        file.write(codec.encode(batch))


class OrchestratorSource(Source):
    """The batches that this run's orchestrator sends."""

    def __init__(self, paths: RunPaths, mesh: Mesh, timeout: float) -> None:
        """`timeout` is in seconds, for one batch. While an evaluation holds up training it does not run."""
        self.paths, self.mesh, self.timeout = paths, mesh, timeout
        self._evaluating = AtWork(paths, "orchestrator", (EVALUATING,))

    def receive(self, step: int, tick: Tick = lambda: None) -> StepBatch:
        """Wait for the batch of `step` and read it. The file stays until `done`. Raises WaitTimeout, or ValueError for a damaged file."""
        path = self.paths.batch_of(step)

        def read(waits: Tick) -> bytearray:
            what = f"the batch of step {step} ({path}); see the orchestrator's log"
            wait_for(lambda: listed(path), what, self.timeout, poll=0.002, tick=waits, excused=self._evaluating)
            content = bytearray(path.stat().st_size)  # a bytearray makes writable arrays, which torch uses without a copy
            with path.open("rb") as file:
                file.readinto(content)
            return content

        return _decoded(self.mesh.read(read, tick), step, str(path))

    def done(self, step: int) -> None:
        """Delete the batch."""
        if self.mesh.first:
            self.paths.batch_of(step).unlink(missing_ok=True)


class RecordedSource(Source):
    """The recorded batches of another run, in their order."""

    def __init__(self, paths: RunPaths, mesh: Mesh, num_minibatches: int | None = None, *, own: bool = True) -> None:
        """`paths` are those of the recording run. If `num_minibatches` differs from the recording's, groups are split again.

        `own`: whether this trainer does what the recording run's did, so that its versions are those that sampled.
        """
        self.paths, self.mesh, self.num_minibatches, self.own = paths, mesh, num_minibatches, own

    def receive(self, step: int, tick: Tick = lambda: None) -> StepBatch:
        """The batch of `step`. Raises FileNotFoundError if it was not recorded, ValueError for a damaged file."""
        path = self.paths.recorded_of(step)
        batch = _decoded(self.mesh.read(lambda _: _decompressed(path)), step, str(path))
        return batch if self.num_minibatches in (None, len(batch.mini_batches)) else split(batch, self.num_minibatches)


def read_recorded(path: Path, step: int) -> StepBatch:
    """The recorded batch of `step`, in one process. Raises FileNotFoundError, or ValueError for a damaged file."""
    return _decoded(_decompressed(path), step, str(path))


def _decompressed(path: Path) -> bytearray:
    import zstandard  # only for recordings: supervised training should need only torch, numpy and the standard library

    with path.open("rb") as file:
        try:
            return bytearray(zstandard.ZstdDecompressor().stream_reader(file).read())
        except zstandard.ZstdError as error:
            raise ValueError(f"{path} is damaged: {error}") from error


def _decoded(content: bytes | bytearray, step: int, where: str) -> StepBatch:
    try:
        batch = codec.decode(content, StepBatch)
    except codec.CodecError as error:
        raise codec.CodecError(f"{where}: {error}") from error
    assert batch.step == step, f"{where} holds the batch of step {batch.step}"
    return batch


def split(batch: StepBatch, num_minibatches: int) -> StepBatch:
    """The same samples in `num_minibatches` mini-batches of neighbouring groups, as equal as possible. Groups stay whole."""
    groups: dict[int, list[TrainingSample]] = {}
    for sample in chain.from_iterable(batch.mini_batches):
        groups.setdefault(sample.group, []).append(sample)
    parts = np.array_split(np.array(list(groups), dtype=np.int64), num_minibatches)
    return replace(batch, mini_batches=tuple(tuple(chain.from_iterable(groups[int(group)] for group in part)) for part in parts))


class FakeSource(Source):
    """Groups of random tokens with a common prompt. The same seed gives the same batches."""

    def __init__(
        self,
        *,
        groups: int,
        members: int,
        prompt_tokens: tuple[int, int],
        completion_tokens: tuple[int, int],
        vocab_size: int,
        seed: int = 0,
        streams: Sequence[str] = (),
        sampled: bool = True,
        mini_batches: int = 1,
    ) -> None:
        """`prompt_tokens` and `completion_tokens` are (fewest, most). `streams` names the streams that get values.

        `sampled`: as if sampled by the newest policy; False: as supervised data, which no policy sampled.
        """
        assert set(streams) <= set(STREAMS), streams
        self.sampled, self.mini_batches = sampled, mini_batches
        self.groups, self.members, self.prompt_tokens, self.completion_tokens = groups, members, prompt_tokens, completion_tokens
        self.vocab_size, self.seed, self.streams = vocab_size, seed, streams

    def receive(self, step: int, tick: Tick = lambda: None) -> StepBatch:
        """The batch of `step`. It does not depend on earlier calls."""
        rng = np.random.default_rng([self.seed, step])
        samples = []
        for group in range(self.groups):
            prompt = rng.integers(0, self.vocab_size, rng.integers(*self.prompt_tokens, endpoint=True))
            for member in range(self.members):
                completion = rng.integers(0, self.vocab_size, rng.integers(*self.completion_tokens, endpoint=True))
                mask = np.arange(len(prompt) + len(completion)) >= len(prompt)
                optional: Any = {name: rng.random(len(mask), dtype=np.float32) for name in self.streams}
                if "ce_weights" in optional:
                    optional["ce_weights"][0] = 0  # nothing predicts a first token
                samples.append(
                    TrainingSample(
                        group=group,
                        member=member,
                        env="fake",
                        token_ids=np.concatenate([prompt, completion]).astype(np.int32),
                        loss_mask=mask,
                        inference_logprobs=np.where(mask, rng.normal(-math.log(self.vocab_size), 0.1, len(mask)), 0).astype(np.float32),
                        advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
                        temperature=np.ones(len(mask), np.float32),
                        versions=np.where(mask & self.sampled, step, -1).astype(np.int32),
                        **optional,
                    )
                )
        return split(StepBatch(step=step, mini_batches=(tuple(samples),)), self.mini_batches)
