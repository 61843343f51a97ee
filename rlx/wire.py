"""A `StepBatch` as bytes and back: a small msgpack header of shapes, then the arrays' raw memory, end to end.

Layout, little-endian: magic (8 bytes) · header length (u64) · header · padding to 64 · the arrays, each padded to 64.
The arrays of a micro-batch follow the order of `ARRAYS`; their lengths (T, R, S+1) are in the header, their dtypes are fixed here.
Decoded arrays are writable views on the one buffer they came in; nothing is copied.
Knows nothing of files or sockets (`rlx.transport`) and nothing of torch.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlx.types import MicroBatch, MiniBatch, StepBatch

MAGIC = b"RLXBAT01"
_PREFIX = struct.Struct("<8sQ")
_ALIGN = 64

ARRAYS: tuple[tuple[str, np.dtype, str], ...] = (
    ("token_ids", np.dtype("<i4"), "T"),
    ("labels", np.dtype("<i4"), "T"),
    ("position_ids", np.dtype("<i4"), "T"),
    ("loss_mask", np.dtype("?"), "T"),
    ("inference_logprobs", np.dtype("<f4"), "T"),
    ("advantages", np.dtype("<f4"), "T"),
    ("temperature", np.dtype("<f4"), "T"),
    ("versions", np.dtype("<i4"), "T"),
    ("rollout_ids", np.dtype("<i4"), "T"),
    ("rollout_lengths", np.dtype("<i4"), "R"),
    ("cu_seqlens", np.dtype("<i4"), "S+1"),
)
"""Field of MicroBatch, dtype on the wire, and which of the three lengths it has."""


class MicroShape(msgspec.Struct, array_like=True):
    tokens: int  # T
    rollouts: int  # R
    boundaries: int  # S+1


class MiniHeader(msgspec.Struct, array_like=True):
    num_loss_tokens: int
    num_sequences: int
    ranks: list[list[MicroShape]]  # [rank][m]


class Header(msgspec.Struct):
    step: int
    mini_batches: list[MiniHeader]


def encode(batch: StepBatch) -> list[bytes | memoryview]:
    """The pieces whose concatenation is the message, without copying the arrays (for `writelines` or a multipart send)."""
    header = Header(
        step=batch.step,
        mini_batches=[
            MiniHeader(
                mini.num_loss_tokens,
                mini.num_sequences,
                [[MicroShape(len(m.token_ids), len(m.rollout_lengths), len(m.cu_seqlens)) for m in rank] for rank in mini.micro_batches],
            )
            for mini in batch.mini_batches
        ],
    )
    head = msgspec.msgpack.encode(header)
    pieces: list[bytes | memoryview] = [_PREFIX.pack(MAGIC, len(head)), head, _padding(_PREFIX.size + len(head))]
    for mini in batch.mini_batches:
        for rank in mini.micro_batches:
            for micro in rank:
                for name, dtype, length in ARRAYS:
                    array = getattr(micro, name)
                    wanted = (dtype, (_lengths(micro)[length],))
                    assert (array.dtype, array.shape) == wanted, f"{name}: {array.dtype} {array.shape}, not {wanted}"
                    pieces += [np.ascontiguousarray(array).data.cast("B") if len(array) else b"", _padding(array.nbytes)]
    return pieces


def decode(buffer: bytearray | bytes | memoryview) -> StepBatch:
    """The batch whose arrays are views on `buffer`. Raises ValueError when the bytes are no whole batch."""
    if len(buffer) < _PREFIX.size:
        raise ValueError(f"{len(buffer)} bytes are no step batch; its file was cut short")
    magic, size = _PREFIX.unpack_from(buffer)
    if magic != MAGIC:
        raise ValueError(f"a step batch begins with {MAGIC!r}, not {magic!r}; orchestrator and trainer must run the same version of rlx")
    if len(buffer) < _PREFIX.size + size:
        raise ValueError(f"the step batch's header is {size} bytes, but {len(buffer) - _PREFIX.size} came; its file was cut short")
    header = msgspec.msgpack.decode(memoryview(buffer)[_PREFIX.size : _PREFIX.size + size], type=Header)
    cursor = _Cursor(buffer, _PREFIX.size + size)
    minis = []
    for mini in header.mini_batches:
        ranks = tuple(tuple(cursor.micro(shape) for shape in rank) for rank in mini.ranks)
        minis.append(MiniBatch(micro_batches=ranks, num_loss_tokens=mini.num_loss_tokens, num_sequences=mini.num_sequences))
    if cursor.offset != len(buffer):
        raise ValueError(f"the step batch of step {header.step} is {cursor.offset} bytes long, but {len(buffer)} came")
    return StepBatch(step=header.step, mini_batches=tuple(minis))


class _Cursor:
    """Reads aligned arrays off a buffer, one behind the other."""

    def __init__(self, buffer: Any, offset: int) -> None:
        self.buffer = buffer
        self.offset = offset + len(_padding(offset))

    def micro(self, shape: MicroShape) -> MicroBatch:
        lengths = {"T": shape.tokens, "R": shape.rollouts, "S+1": shape.boundaries}
        return MicroBatch(**{name: self._array(dtype, lengths[length]) for name, dtype, length in ARRAYS})

    def _array(self, dtype: np.dtype, length: int) -> NDArray:
        size = dtype.itemsize * length
        if self.offset + size > len(self.buffer):
            raise ValueError(f"the step batch needs {self.offset + size} bytes, but {len(self.buffer)} came; its file was cut short")
        array = np.frombuffer(self.buffer, dtype, length, self.offset)
        self.offset += size + len(_padding(size))
        return array


def _lengths(micro: MicroBatch) -> dict[str, int]:
    return {"T": len(micro.token_ids), "R": len(micro.rollout_lengths), "S+1": len(micro.cu_seqlens)}


def _padding(size: int) -> bytes:
    return b"\0" * (-size % _ALIGN)
