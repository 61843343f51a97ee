"""Frozen records as bytes and back: typed by the dataclass's own annotations, versioned by a schema name, without pickle.

    prefix (32 bytes)    magic with the container's version · header length · total length · CRC-32 of everything after the prefix
    header               JSON: {"schema": "rlx.StepBatch/2", "record": its columns}, padded to 64 bytes
    arrays               raw little-endian memory, in the order of the header's entries, each padded to 64 bytes

Records are stored as columns. For the 256 samples of a batch, the header has one list of members, one of environments, and so on. Their
token ids form one array with a list of lengths, `{"lengths": [96, 88, …], "size": [24576]}`. A decoded sample holds slices of it.
An array with few runs (a mask, versions, one advantage per rollout) is stored as its runs' lengths and values, `"size": [24576, 512]`.
So a sample costs about 8 bytes per token, for ids and log-probabilities.

A top-level record has a class variable `SCHEMA`, a name with a number. The name is independent of the class name, so a class may be
renamed. Raise the number when old files can no longer be read. Adding a field with a default needs no new number: files without it get
the default. Fields annotated as `Any` hold plain values (`rlx.plain`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import struct
import types
import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, islice
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from rlx import arrays
from rlx.plain import SCALARS, CodecError, from_json, name_of, one_of, to_json, write_each

MAGIC = b"RLXREC"
CONTAINER = b"01"  # version of the layout around the record
_PREFIX = struct.Struct("<6s2sQQI4x")
_ALIGN = 64
_RUNS_FROM = 1024  # bytes; runs are not searched in shorter arrays
_BITS: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}

Piece = bytes | memoryview
T = TypeVar("T")


def encode(record: Any) -> list[Piece]:
    """The record's bytes as pieces to concatenate (for `writelines` or `join`).

    Raises CodecError naming the field that cannot be stored, and its value.
    """
    arrays: list[Piece] = []
    kind: Any = type(record)
    body = _column(kind).write([record], arrays)
    header = json.dumps({"schema": kind.SCHEMA, "record": body}, separators=(",", ":")).encode()
    pieces = [header, _padding(_PREFIX.size + len(header)), *arrays]
    size, check = _PREFIX.size, 0
    for piece in pieces:
        size += len(piece)
        check = zlib.crc32(piece, check)
    return [_PREFIX.pack(MAGIC, CONTAINER, len(header), size, check), *pieces]


def decode(buffer: bytearray | bytes | memoryview, kind: type[T]) -> T:
    """The record of type `kind` in `buffer`. Its arrays are views on the buffer, writable if the buffer is (a bytearray).

    Raises CodecError if the bytes are cut, damaged, another record, or written by another version of rlx.
    """
    wanted: str = getattr(kind, "SCHEMA")  # noqa: B009  (a TypeVar has no attributes)
    hint: Any = kind
    view = memoryview(buffer)
    if len(view) < _PREFIX.size:
        raise CodecError(f"{len(view)} bytes are no {wanted}: the file was cut short")
    magic, container, header_size, size, check = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise CodecError(f"a record of rlx begins with {MAGIC!r}, not {magic!r}: this is no {wanted}")
    if container != CONTAINER:
        raise CodecError(f"this has layout {container!r}, but this rlx reads {CONTAINER!r}: another version of rlx wrote it; use that one")
    if len(view) != size:
        what = "the file was cut short" if len(view) < size else "something was appended to it"
        raise CodecError(f"a {wanted} of {size} bytes was written, but {len(view)} bytes were read: {what}")
    if zlib.crc32(view[_PREFIX.size :]) != check:
        raise CodecError(f"the checksum of these {size} bytes is wrong: they were damaged after they were written")
    header = json.loads(bytes(view[_PREFIX.size : _PREFIX.size + header_size]))
    _check_schema(header["schema"], wanted)
    start = _PREFIX.size + header_size
    arrays = _Arrays(view, start + len(_padding(start)))
    try:
        (record,) = _column(hint).read(header["record"], 1, arrays)
    except (TypeError, KeyError, AttributeError) as error:
        raise CodecError(f"this rlx does not know the fields of this {wanted}: {error}; another version of rlx wrote it") from error
    return record


def _check_schema(found: str, wanted: str) -> None:
    if found == wanted:
        return
    (name, _, number), (wanted_name, _, wanted_number) = found.partition("/"), wanted.partition("/")
    if name != wanted_name:
        raise CodecError(f"this is a {found}, but a {wanted} was requested")
    which = "a newer" if int(number) > int(wanted_number) else "an earlier"
    raise CodecError(f"this is a {found}, written by {which} rlx, but this one reads {wanted}: use the rlx that wrote it")


class _Arrays:
    """Reads consecutive arrays from a buffer."""

    def __init__(self, buffer: memoryview, offset: int) -> None:
        self.buffer, self.offset = buffer, offset

    def next(self, dtype: np.dtype, count: int) -> NDArray:
        array = np.frombuffer(self.buffer, dtype, count, self.offset)
        self.offset += array.nbytes + -array.nbytes % _ALIGN
        return array


@dataclasses.dataclass(frozen=True)
class _Column:
    """Writes and reads the values of one annotation, many at once."""

    write: Callable[[Sequence[Any], list[Piece]], Any]  # (values, arrays after the header, to append to) -> the header's entry
    read: Callable[[Any, int, _Arrays], Sequence[Any]]  # (the header's entry, number of values, the arrays) -> values


@functools.cache
def _column(hint: Any) -> _Column:
    """The column of an annotation. Raises TypeError for an unsupported annotation."""
    origin, arguments = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _records(hint)  # type: ignore[arg-type]
    if hint is Any:
        return _Column(lambda values, _: write_each(to_json, values), lambda body, *_: [from_json(value) for value in body])
    if hint in SCALARS:
        return _Column(lambda values, _: write_each(SCALARS[hint], values), lambda body, *_: body)
    if origin is Literal:
        return _Column(lambda values, _: write_each(functools.partial(one_of, arguments), values), lambda body, *_: body)
    if origin is NDArray:  # since numpy 2.5, where it is an alias with a name
        return _arrays(np.dtype(arguments[0]))
    if origin is np.ndarray:
        return _arrays(np.dtype(get_args(arguments[1])[0]))
    if origin in (Union, types.UnionType) and len(arguments) == 2 and arguments[1] is type(None):
        return _optionals(_column(arguments[0]))
    if origin is list or (origin is tuple and arguments[1:] == (...,)):
        return _sequences(origin, _column(arguments[0]))
    if origin is dict and arguments[0] is str:
        return _mappings(_column(arguments[1]))
    raise TypeError(f"the codec does not know the annotation {hint}; use another, or add it to rlx/codec.py")


def _records(kind: type) -> _Column:
    hints = get_type_hints(kind, localns=vars(arrays))
    columns = {field.name: _column(hints[field.name]) for field in dataclasses.fields(kind)}
    may_lack = {field.name for field in dataclasses.fields(kind) if field.default is None}

    def write(records: Sequence[Any], arrays: list[Piece]) -> dict[str, Any]:
        for row, record in enumerate(records):
            if type(record) is not kind:
                raise CodecError(f"{name_of(record)} is no {kind.__name__}", row)
        body = {}
        for name, column in columns.items():
            values = [getattr(record, name) for record in records]
            if name in may_lack and all(value is None for value in values):
                continue
            try:
                body[name] = column.write(values, arrays)
            except CodecError as error:
                raise error.inside(f".{name}", error.row) from None
        return body

    def read(body: dict[str, Any], count: int, arrays: _Arrays) -> list[Any]:
        found = [columns[name].read(column, count, arrays) for name, column in body.items()]
        return [kind(**dict(zip(body, values, strict=True))) for values in zip(*found, strict=True)]

    return _Column(write, read)


def _arrays(dtype: np.dtype) -> _Column:
    def write(values: Sequence[Any], arrays: list[Piece]) -> dict[str, list[int]]:
        for row, array in enumerate(values):
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
                raise CodecError(f"{name_of(array)} is no array of {dtype} [n]", row)
        whole = np.concatenate(values) if values else np.empty(0, dtype)
        if (runs := _runs(whole)) is None:
            _append(whole, arrays)
            return {"lengths": list(map(len, values)), "size": [len(whole)]}
        for part in runs:
            _append(part, arrays)
        return {"lengths": list(map(len, values)), "size": [len(whole), len(runs[0])]}

    def read(body: dict[str, list[int]], _: int, arrays: _Arrays) -> list[NDArray]:
        size, *runs = body["size"]
        if runs:
            lengths = arrays.next(np.dtype("<i4"), runs[0])
            whole = np.repeat(arrays.next(dtype, runs[0]), lengths)
        else:
            whole = arrays.next(dtype, size)
        return [whole[end - length : end] for length, end in zip(body["lengths"], accumulate(body["lengths"]), strict=True)]

    return _Column(write, read)


def _runs(array: NDArray) -> tuple[NDArray, NDArray] | None:
    """Lengths and values of runs of equal values, if they take at most half the space. Compares bits, so NaN and -0.0 survive."""
    if array.nbytes < _RUNS_FROM:
        return None
    bits: NDArray = array.view(_BITS[array.itemsize])
    changes = bits[1:] != bits[:-1]
    if 2 * (1 + int(np.count_nonzero(changes))) * (4 + array.itemsize) > array.nbytes:
        return None
    starts = np.concatenate([[0], np.flatnonzero(changes) + 1])
    return np.diff(starts, append=len(array)).astype("<i4"), array[starts]


def _append(array: NDArray, arrays: list[Piece]) -> None:
    arrays.append(array.data.cast("B") if array.size else b"")
    arrays.append(_padding(array.nbytes))


def _optionals(column: _Column) -> _Column:
    """`null` if all are None; otherwise the indices of the others (`null`: all) and their column."""

    def write(values: Sequence[Any], arrays: list[Piece]) -> list | None:
        places = [row for row, value in enumerate(values) if value is not None]
        if not places and values:
            return None
        try:
            body = column.write([values[row] for row in places], arrays)
        except CodecError as error:
            error.row = places[error.row]
            raise
        return [None if len(places) == len(values) else places, body]

    def read(body: list | None, count: int, arrays: _Arrays) -> Sequence[Any]:
        if body is None:
            return [None] * count
        places, inner = body
        if places is None:
            return column.read(inner, count, arrays)
        values: list[Any] = [None] * count
        for row, value in zip(places, column.read(inner, len(places), arrays), strict=True):
            values[row] = value
        return values

    return _Column(write, read)


def _sequences(kind: type, column: _Column) -> _Column:
    def write(values: Sequence[Any], arrays: list[Piece]) -> dict[str, Any]:
        for row, value in enumerate(values):
            if type(value) is not kind:
                raise CodecError(f"{name_of(value)} is no {kind.__name__}", row)
        lengths = list(map(len, values))
        try:
            return {"lengths": lengths, "items": column.write(list(chain.from_iterable(values)), arrays)}
        except CodecError as error:
            row, place = _place(lengths, error.row)
            raise error.inside(f"[{place}]", row) from None

    def read(body: dict[str, Any], _: int, arrays: _Arrays) -> list[Any]:
        items = iter(column.read(body["items"], sum(body["lengths"]), arrays))
        return [kind(islice(items, length)) for length in body["lengths"]]

    return _Column(write, read)


def _mappings(column: _Column) -> _Column:
    def write(values: Sequence[Any], arrays: list[Piece]) -> dict[str, Any]:
        for row, value in enumerate(values):
            if not isinstance(value, dict) or not all(type(key) is str for key in value):
                raise CodecError(f"{name_of(value)} is no dict with str keys", row)
        keys = [list(value) for value in values]
        try:
            return {"keys": keys, "items": column.write([item for value in values for item in value.values()], arrays)}
        except CodecError as error:
            row, place = _place(list(map(len, values)), error.row)
            raise error.inside(f"[{keys[row][place]!r}]", row) from None

    def read(body: dict[str, Any], _: int, arrays: _Arrays) -> list[dict[str, Any]]:
        items = iter(column.read(body["items"], sum(map(len, body["keys"])), arrays))
        return [dict(zip(keys, islice(items, len(keys)), strict=True)) for keys in body["keys"]]

    return _Column(write, read)


def _place(lengths: list[int], item: int) -> tuple[int, int]:
    """The row that an item of a flat list came from, and its index in that row."""
    ends = list(accumulate(lengths))
    row = bisect_right(ends, item)
    return row, item - ends[row] + lengths[row]


def _padding(size: int) -> bytes:
    return bytes(-size % _ALIGN)
