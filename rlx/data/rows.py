"""Opens a data set: rows by index, from JSONL or Parquet files, a folder of them, or the Hugging Face hub.

A JSONL file is read here, line by line, as Python's `json` reads it. The common reader, Arrow's, gives every row the keys of all rows,
makes dates out of texts that look like one, and refuses values of different types under one key: tool calls have all three. Parquet and
the hub are read by the `datasets` package. Either way rows stay on disk until they are asked for.
"""

from __future__ import annotations

import glob
import hashlib
import json
import mmap
import os
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np

JSONL, PARQUET = (".jsonl", ".ndjson"), (".parquet",)
HELD_OUT = {"test", "valid", "validation", "val", "dev", "eval"}  # words in the names of files that are not to train on
BLOCK, BLOCKS = 1 << 20, 64  # bytes, and how many blocks of a larger file are hashed
SLICE = re.compile(r"(?P<name>[\w.-]+)(\[(?P<start>\d*%?):(?P<end>\d*%?)\])?")


class HubNotReached(ValueError):
    """The hub did not answer, and the cache lacks the data set."""


class Rows(Protocol):
    """A data set: `len(rows)`, `rows[i]`."""

    fills: bool  # a mapping may have keys of other rows, with None (see `rlx.data.conversations`)

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...

    def where(self, index: int) -> str:
        """The place of a row, for people: `row 17 of data.jsonl (line 18)`."""
        ...


def open_rows(name: str, *, subset: str | None = None, split: str = "train") -> Rows:
    """The data set `name`: a file, a pattern of files (`data/*.parquet`), a folder, or a name on the hub.

    `split` may be a part: `train[:1000]`, `train[90%:]`; files and folders have only the split `train`. Raises ValueError, of the class
    HubNotReached where another machine or time may help.
    """
    files = files_of(name)
    if files is None:
        return _of_the_hub(name, subset, split)
    if subset is not None:
        raise ValueError(f"{name}: files have no subset, but the subset is {subset!r}; leave it out")
    match = SLICE.fullmatch(split)
    if match is None or match["name"] != "train":
        raise ValueError(f"{name}: files have only the split `train` and its parts, such as train[:1000]; got {split!r}")
    parts: list[Rows] = [_JsonLines(file) if file.suffix in JSONL else _parquet(file) for file in files]
    length = sum(map(len, parts))
    if not length:
        raise ValueError(f"{name} has no rows")
    rows = _Joined(parts, _bound(match["start"], length, 0), _bound(match["end"], length, length))
    if not len(rows):
        raise ValueError(f"{name}: the part {split} has no rows")
    return rows


def files_of(name: str) -> list[Path] | None:
    """The files of a data set on disk, in the order of their names; None if `name` can only be one of the hub's.

    Raises ValueError for a path without such files, and for a folder with files to train on and files that are held out.
    """
    path = Path(name).expanduser()
    known = ", ".join((*JSONL, *PARQUET))
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in (*JSONL, *PARQUET) and not _is_hidden(file.relative_to(path)))
        if not files:
            raise ValueError(f"the folder {name} has no files that end in {known}")
        _check_splits(path, files)
        return files
    if path.is_file():  # also one with brackets in its name
        files = [path]
    elif glob.has_magic(name):
        files = sorted(Path(found) for found in glob.glob(str(path), recursive=True))
        if not files:
            raise ValueError(f"no file matches {name}")
    elif path.exists() or path.suffix in (*JSONL, *PARQUET) or name.startswith(("/", "./", "../", "~")):
        files = [path]
    else:
        return None
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} does not exist")
        if file.suffix not in (*JSONL, *PARQUET):
            raise ValueError(f"{file} is neither JSONL nor Parquet; its name must end in one of {known}")
    return files


def digest_of(name: str, rows: Rows) -> dict[str, Any]:
    """What shows that a data set has changed: `{"rows": n, "bytes": n, "blake2": hex}`, wherever its files are.

    Of a file larger than 64 MiB only 64 blocks are hashed, of the hub's rows only 64 rows; these have no `bytes`.
    """
    digest = hashlib.blake2b(digest_size=16)
    files = files_of(name)
    if files is None:
        for index in np.linspace(0, len(rows) - 1, min(BLOCKS, len(rows))).astype(int):
            digest.update(json.dumps(rows[int(index)], default=repr, sort_keys=True).encode())
        return {"rows": len(rows), "blake2": digest.hexdigest()}
    sizes = [path.stat().st_size for path in files]
    for path, size in zip(files, sizes, strict=True):
        starts = range(0, size, BLOCK) if size <= BLOCK * BLOCKS else np.linspace(0, size - BLOCK, BLOCKS).astype(int)
        with path.open("rb") as file:
            for start in starts:
                file.seek(int(start))
                digest.update(file.read(BLOCK))
    return {"rows": len(rows), "bytes": sum(sizes), "blake2": digest.hexdigest()}


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _check_splits(folder: Path, files: Sequence[Path]) -> None:
    """Raise ValueError if names say that some files are to train on, and others are held out."""
    words = {file: set(re.split(r"[^a-z]+", str(file.relative_to(folder).with_suffix("")).lower())) for file in files}
    held_out = [str(file) for file in files if words[file] & HELD_OUT]
    train = [str(file) for file in files if "train" in words[file] and str(file) not in held_out]
    if held_out and train:
        raise ValueError(
            f"the folder {folder} has files to train on ({', '.join(train[:3])}) and files that are held out ({', '.join(held_out[:3])}); "
            f"name only those to train on, by a pattern such as {folder}/*train*"
        )


def _bound(text: str | None, length: int, default: int) -> int:
    if not text:
        return default
    return min(length, round(length * int(text[:-1]) / 100) if text.endswith("%") else int(text))


class _JsonLines:
    """A JSONL file. Empty lines do not count as rows."""

    fills = False

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
        starts, lines, at, line = [], [], 0, 0
        while at < len(self._bytes):
            end = self._bytes.find(b"\n", at)
            end = len(self._bytes) if end < 0 else end
            line += 1
            if self._bytes[at : min(end, at + 64)].strip() or self._bytes[at:end].strip():
                starts.append(at)
                lines.append(line)
            at = end + 1
        self._starts, self._lines = np.array(starts, np.int64), np.array(lines, np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        start = int(self._starts[index])
        end = self._bytes.find(b"\n", start)
        try:
            row = json.loads(self._bytes[start:] if end < 0 else self._bytes[start:end])
        except ValueError as error:
            raise ValueError(f"{self.where(index)} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{self.where(index)} is JSON of type {type(row).__name__}; it must be an object")
        return row

    def where(self, index: int) -> str:
        return f"row {index} of {self.path} (line {self._lines[index]})"


class _Arrow:
    """A data set of the `datasets` package."""

    fills = True

    def __init__(self, data: Any, name: str) -> None:
        self._data, self._name = data, name

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self._data[index]

    def where(self, index: int) -> str:
        return f"row {index} of {self._name}"


def _parquet(path: Path) -> _Arrow:
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    try:
        return _Arrow(Dataset.from_parquet(str(path)), str(path))
    except Exception as error:  # pyarrow and datasets have no common class of errors
        raise ValueError(f"{path} cannot be read as Parquet: {type(error).__name__}: {error}") from error


def _of_the_hub(name: str, subset: str | None, split: str) -> _Arrow:
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    which = f"{name} (subset {subset}, split {split})"
    try:
        rows = _Arrow(load_dataset(name, subset, split=split), f"{name}{f'/{subset}' if subset else ''}, split {split}")
    except ConnectionError as error:
        silent = "HF_HUB_OFFLINE=1 forbids asking the hub" if os.environ.get("HF_HUB_OFFLINE") == "1" else "the hub does not answer"
        raise HubNotReached(f"the data set {which} is no file or folder here, the cache lacks it, and {silent}") from error
    except Exception as error:  # of the network, the hub, the files or the names
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise ValueError(f"the data set {which} is no file or folder here, and cannot be loaded from the hub: {why}") from error
    if not len(rows):
        raise ValueError(f"the data set {which} has no rows")
    return rows


class _Joined:
    """The rows from `start` to `end` of several files."""

    def __init__(self, parts: Sequence[Rows], start: int, end: int) -> None:
        self._parts, self._ends, self._range = parts, list(accumulate(map(len, parts))), range(start, end)
        self.fills = any(part.fills for part in parts)

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        part, inside = self._find(index)
        return part[inside]

    def where(self, index: int) -> str:
        part, inside = self._find(index)
        return part.where(inside)

    def _find(self, index: int) -> tuple[Rows, int]:
        place = self._range[index]
        number = bisect_right(self._ends, place)
        return self._parts[number], place - (self._ends[number - 1] if number else 0)
