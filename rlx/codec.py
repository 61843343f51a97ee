"""Frozen records as bytes and back: msgpack by the dataclass's own annotations, without pickle.

    prefix (12 bytes)    magic with the layout's number · CRC-32 of everything after the prefix
    msgpack              [schema name, such as "rlx.StepBatch/3", record]; an array is [its type, its little-endian memory]

A top-level record has a class variable `SCHEMA`, a name with a number. The name is independent of the class name, so a class may be
renamed. Raise the number when old files can no longer be read. Adding a field with a default needs no new number: files without it get
the default. Fields annotated as `Any` come back as msgpack has them: a tuple as a list, an object that it does not know as its `repr`.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, TypeVar, get_args

import msgspec
import numpy as np

from rlx.json_values import CodecError

MAGIC = b"RLXREC02"
_PREFIX = struct.Struct("<8sI")

T = TypeVar("T")


def encode(record: Any) -> bytes:
    """The record's bytes. Raises CodecError for a value that msgpack cannot hold, such as a number of more than 64 bits."""
    try:
        body = msgspec.msgpack.encode([record.SCHEMA, record], enc_hook=to_plain)
    except (OverflowError, UnicodeEncodeError) as error:
        raise CodecError(f"{type(record).__name__}: {error}") from error
    return _PREFIX.pack(MAGIC, zlib.crc32(body)) + body


def decode(buffer: bytearray | bytes | memoryview, kind: type[T]) -> T:
    """The record of type `kind` in `buffer`. Raises CodecError if the bytes are damaged, another record, or another version's."""
    wanted: str = getattr(kind, "SCHEMA")  # noqa: B009  (a TypeVar has no attributes)
    view = memoryview(buffer)
    if view[:6] != MAGIC[:6]:
        raise CodecError(f"these {len(view)} bytes are no {wanted}")
    if view[:8] != MAGIC:
        raise CodecError("another version of rlx wrote this; use that one")
    body = view[_PREFIX.size :]
    if len(view) < _PREFIX.size or zlib.crc32(body) != _PREFIX.unpack_from(view)[1]:
        raise CodecError(f"the checksum of these {len(view)} bytes is wrong: they were cut short or damaged after they were written")
    found, record = msgspec.msgpack.decode(body, type=tuple[str, msgspec.Raw])
    if found != wanted:
        raise CodecError(f"this is a {found}, but this rlx reads {wanted} here; another number is of another version of rlx")
    try:
        return msgspec.msgpack.decode(record, type=kind, dec_hook=to_array)
    except msgspec.ValidationError as error:
        raise CodecError(f"this {wanted} has other fields than those of this rlx: {error}") from error


def to_plain(value: Any) -> Any:
    """What msgpack holds of a value that it does not know."""
    if isinstance(value, np.ndarray):
        return [value.dtype.str, np.ascontiguousarray(value).data]
    return value.item() if isinstance(value, np.generic) else repr(value)


def to_array(kind: Any, value: Any) -> Any:
    """The array [n] of an annotation of `rlx.arrays`. It is writable, which torch needs to use its memory."""
    written, content = value
    wanted = np.dtype(get_args(get_args(kind)[1])[0])
    if np.dtype(written) != wanted:
        raise ValueError(f"an array of {written}, not of {wanted}")
    return np.frombuffer(bytearray(content), wanted)
