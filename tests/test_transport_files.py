"""Step batches over the wire and through files."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rlx import wire
from rlx.paths import RunPaths
from rlx.transport.files import BatchReader, BatchWriter
from rlx.types import MicroBatch, MiniBatch, StepBatch
from rlx.waiting import WaitTimeout


def micro_batch(rng: np.random.Generator, tokens: int, rollouts: int, samples: int) -> MicroBatch:
    def ints(n: int) -> np.ndarray:
        return rng.integers(0, 1000, n).astype(np.int32)

    def floats() -> np.ndarray:
        return rng.normal(size=tokens).astype(np.float32)

    return MicroBatch(
        token_ids=ints(tokens),
        labels=ints(tokens),
        position_ids=ints(tokens),
        loss_mask=rng.random(tokens) < 0.5,
        inference_logprobs=floats(),
        advantages=floats(),
        temperature=floats(),
        versions=ints(tokens),
        rollout_ids=ints(tokens),
        rollout_lengths=ints(rollouts),
        cu_seqlens=ints(samples + 1),
    )


def step_batch(step: int = 3, ranks: int = 2, minis: int = 2) -> StepBatch:
    rng = np.random.default_rng(step)
    shapes = [(33, 2, 3), (0, 0, 0), (7, 1, 1)]
    return StepBatch(
        step=step,
        mini_batches=tuple(
            MiniBatch(
                micro_batches=tuple(tuple(micro_batch(rng, *shape) for shape in shapes) for _ in range(ranks)),
                num_loss_tokens=17 + index,
                num_sequences=5,
            )
            for index in range(minis)
        ),
    )


def assert_equal(a: StepBatch, b: StepBatch) -> None:
    assert a.step == b.step
    assert len(a.mini_batches) == len(b.mini_batches)
    for x, y in zip(a.mini_batches, b.mini_batches, strict=True):
        assert (x.num_loss_tokens, x.num_sequences) == (y.num_loss_tokens, y.num_sequences)
        assert [len(rank) for rank in x.micro_batches] == [len(rank) for rank in y.micro_batches]
        for rank_x, rank_y in zip(x.micro_batches, y.micro_batches, strict=True):
            for micro_x, micro_y in zip(rank_x, rank_y, strict=True):
                for field in dataclasses.fields(MicroBatch):
                    left, right = getattr(micro_x, field.name), getattr(micro_y, field.name)
                    assert left.dtype == right.dtype, field.name
                    assert np.array_equal(left, right), field.name


def test_every_field_of_a_micro_batch_is_on_the_wire() -> None:
    assert [name for name, _, _ in wire.ARRAYS] == [field.name for field in dataclasses.fields(MicroBatch)]


def test_a_batch_survives_the_round_trip_with_writable_arrays() -> None:
    batch = step_batch()
    back = wire.decode(bytearray(b"".join(wire.encode(batch))))
    assert_equal(batch, back)
    assert back.mini_batches[0].micro_batches[0][0].token_ids.flags.writeable


def test_a_cut_or_foreign_message_is_refused() -> None:
    message = b"".join(wire.encode(step_batch()))
    for cut in (message[:4], message[:20], message[: len(message) // 2], message[:-1]):
        with pytest.raises(ValueError, match=r"short|bytes"):
            wire.decode(bytearray(cut))
    with pytest.raises(ValueError, match="bytes long"):
        wire.decode(bytearray(message + b"\0"))
    with pytest.raises(ValueError, match="same version"):
        wire.decode(bytearray(b"X" + message[1:]))


def test_a_wrong_dtype_is_an_invariant_broken() -> None:
    batch = step_batch(ranks=1, minis=1)
    micro = batch.mini_batches[0].micro_batches[0][0]
    wrong = dataclasses.replace(micro, advantages=micro.advantages.astype(np.float64))
    mini = dataclasses.replace(batch.mini_batches[0], micro_batches=((wrong,),))
    with pytest.raises(AssertionError, match="advantages"):
        wire.encode(StepBatch(step=0, mini_batches=(mini,)))


def test_a_reader_waits_for_its_own_step_and_deletes_it_when_done(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    writer, reader = BatchWriter(paths), BatchReader(paths)
    writer.send(step_batch(4))
    ticks: list[float] = []
    later = threading.Timer(0.1, writer.send, [step_batch(3)])
    later.start()
    assert_equal(reader.receive(3, timeout=10, tick=lambda: ticks.append(time.monotonic())), step_batch(3))
    later.join()
    assert ticks, "the heartbeat was not called while waiting"
    assert sorted(p.name for p in paths.batches.iterdir()) == ["step_000003.batch", "step_000004.batch"]
    reader.done(3)
    reader.done(3)
    assert [p.name for p in paths.batches.iterdir()] == ["step_000004.batch"]


def test_waiting_for_a_batch_ends_with_what_was_waited_for(tmp_path: Path) -> None:
    with pytest.raises(WaitTimeout, match=r"batch of step 0 .*step_000000\.batch"):
        BatchReader(RunPaths(tmp_path)).receive(0, timeout=0.05)
