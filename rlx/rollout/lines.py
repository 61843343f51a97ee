"""Reads files of rollouts, whoever wrote them: rlx, `rlx synthesize` or verifiers. Records have the names of `rlx.rollout.record`.

A file may be a stranger's. Neither a long line, nor one that expands without end, fills the memory.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import zstandard

MAX_LINE_BYTES = 256 << 20  # bytes of a line


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a file, a few MB in memory at a time. An unfinished last line of a growing file is left out.

    Raises ValueError if a compressed file is cut off: rlx writes them whole, so a part of it is missing.
    """
    rest = b""
    if path.exists() and not path.is_file():
        raise ValueError("it is no ordinary file")  # a pipe or a device, which is read for ever
    with path.open("rb") as file:
        for block in _decompressed(file) if path.suffix == ".zst" else iter(partial(file.read, 1 << 20), b""):
            *whole, rest = (rest + block).split(b"\n")
            if any(len(line) > MAX_LINE_BYTES for line in (*whole, rest)):
                raise ValueError(f"it has a line of more than {MAX_LINE_BYTES >> 20} MiB, and no rollout is that long")
            yield from whole


def _decompressed(file: BinaryIO) -> Iterator[bytes]:
    """The content of a file's frame. Raises ValueError if the file ends within it."""
    frame = zstandard.ZstdDecompressor().decompressobj()
    while packed := file.read(1 << 12):  # of which zstd can make 128 MiB
        yield frame.decompress(packed)
    if not frame.eof:
        raise ValueError("the file is cut off: it ends within its compressed data")


def decoded(line: bytes) -> Any:
    """A line as Python's json reads it: others write its NaN and Infinity, which JSON does not have. Raises ValueError."""
    try:
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(line)
        return json.loads(line)
    except RecursionError:
        raise ValueError("a value in it is nested too deeply to be read") from None


def record_of(line: bytes, env: str = "") -> dict[str, Any]:
    """The record of a line. `env`: of a line that names none. Raises ValueError."""
    record = decoded(line)
    if not isinstance(record, dict):
        raise ValueError("it is no object")
    if "num_tokens" not in record:
        record = _of_results(record)
    status = "ok" if record.get("error") is None else "error"
    return {**record, "env": record.get("env") or env, "status": record.get("status") or status}


def _of_results(record: Mapping[str, Any]) -> dict[str, Any]:
    """A line of `results.jsonl` in verifiers' layout, or of `rlx synthesize` (`rlx.rollout.eval_results.Outcome`)."""
    error = record.get("error")
    usage, timing = (found if isinstance(found := record.get(name), Mapping) else {} for name in ("token_usage", "timing"))
    return {
        **record,
        "group": None,
        "member": record.get("rollout", record.get("member")),
        "advantage": None,
        "num_tokens": usage.get("output_tokens"),
        "stop": record.get("stop_condition"),
        "truncated": record.get("is_truncated", False),
        "error": error.get("message") or error.get("error") if isinstance(error, Mapping) else error,
        "seconds": timing.get("total"),
    }
