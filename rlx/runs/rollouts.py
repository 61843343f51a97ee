"""The rollouts of a run or an evaluation, as a table of numbers for lists, and one by one as records.

Reads `rollouts/step_N.jsonl.zst`, and `results.jsonl` in verifiers' layout, which this command, training runs and verifiers' own
commands write. The table holds about 80 bytes a rollout; texts stay on the disk until one rollout is asked for. It writes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from rlx.config.errors import ConfigError
from rlx.paths import RunPaths
from rlx.rollout.index import NONE, Indexer, RolloutIndex, read_index
from rlx.rollout.results import METADATA, RESULTS

TRAIN, EVAL = "train", "eval"
DEPTH = 5  # folders below an evaluation's in which results are searched
_TEXTS = ("env", "stop", "status", "left_out")
_NUMBERS = ("example", "group", "member", "reward", "advantage", "tokens", "turns", "truncated", "oldest", "newest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file of rollouts."""

    path: Path
    set: str  # "train", "eval", or "eval MODEL" if there are several models
    step: int  # -1: the path names none
    env: str = ""  # for lines that do not name their environment
    run: Path | None = None  # the run directory that it belongs to

    @property
    def stamp(self) -> tuple[int, int]:
        """Changes when the file is replaced or grows."""
        stat = self.path.stat()
        return stat.st_mtime_ns, stat.st_size


def sources_of(root: Path) -> list[Source]:
    """All files of rollouts of a run directory, of a folder with results, or the one file: training first, each by step.

    Raises ConfigError if there are none.
    """
    root = root.expanduser()
    if root.is_file():
        return [_single(root)]
    if not root.is_dir():
        raise ConfigError(f"there is no directory {root}.\n  fix: name a run directory; rlx runs lists them")
    paths = RunPaths(root)
    trained = sorted(paths.rollouts.glob("step_*.jsonl.zst")) if paths.rollouts.is_dir() else []
    found = [Source(path=path, set=TRAIN, step=_number(path.name), run=root) for path in trained]
    found += _results(paths.evaluations if paths.evaluations.is_dir() else root, root if paths.config.is_file() else None)
    if not found:
        what = "(no step yet, or orchestrator.save_rollouts=false)" if paths.config.is_file() else f"and no {RESULTS} below it"
        raise ConfigError(f"{root} has no rollouts {what}.\n  fix: name another run, or the folder of an evaluation")
    return found


def _single(path: Path) -> Source:
    run = path.parent.parent if path.parent.name == "rollouts" else None
    name = _number(path.name)
    step = _number(path.parent.name) if name == NONE else name
    return Source(path=path, set=EVAL if path.name == RESULTS else TRAIN, step=step, env=_environment(path)[0], run=run)


def _results(folder: Path, run: Path | None) -> list[Source]:
    """The results below a folder. `step_20` and `step_9` sort as numbers."""
    files = sorted(_search(folder, DEPTH), key=lambda path: (path.parent.parent, _number(path.parent.name), path))
    facts = {path: _environment(path) for path in files}
    several = len({model for _, model in facts.values()}) > 1
    return [
        Source(path=path, set=f"{EVAL} {model}" if several else EVAL, step=_number(path.parent.name), env=env, run=run)
        for path, (env, model) in facts.items()
    ]


def _search(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / RESULTS).is_file():
        yield folder / RESULTS
    elif depth:
        for inner in folder.iterdir():
            if inner.is_dir() and not inner.is_symlink():
                yield from _search(inner, depth - 1)


def _environment(path: Path) -> tuple[str, str]:
    """Environment and model of results, from the nearest folder `<env>--<model>`, else from their metadata."""
    for folder in path.absolute().parents[:3]:
        env, found, model = folder.name.partition("--")
        if found:
            return env, model
    try:
        facts = json.loads((path.parent / METADATA).read_text())
        return str(facts.get("env_id", "")), str(facts.get("model", ""))
    except (OSError, ValueError):
        return "", ""


def _number(name: str) -> int:
    """12 for `step_000012.jsonl.zst` and `step_12`; -1 for other names."""
    digits = name.partition(".")[0].removeprefix("step_")
    return int(digits) if name.startswith("step_") and digits.isdecimal() else NONE


def index_source(source: Source) -> RolloutIndex:
    """The index of a file: its own, or made by reading its lines. Raises ConfigError for a file that holds no rollouts."""
    try:
        if _is_compressed(source.path) and (index := read_index(source.path)) is not None:
            return index
        indexer = Indexer()
        for line in _lines(source.path):
            indexer.add(line)
        return indexer.done()
    except (ValueError, zstandard.ZstdError) as error:
        raise ConfigError(f"{source.path} cannot be read: {error}") from error


def _is_compressed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == zstandard.FRAME_HEADER


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file with their line breaks, a few MB in memory at a time. An unfinished last line of a growing file is left out."""
    with path.open("rb") as file:
        stream: Any = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True) if _is_compressed(path) else file
        rest = b""
        while block := stream.read(1 << 20):
            *whole, rest = (rest + block).split(b"\n")
            yield from (line + b"\n" for line in whole)
        if rest and _is_compressed(path):
            yield rest


class Table:
    """The columns of all rollouts read so far, n rows. Text columns hold indices into `names`."""

    def __init__(self, parts: Sequence[tuple[Source, RolloutIndex]]) -> None:
        self.sources = [source for source, _ in parts]
        known: dict[str, int] = {}
        columns: dict[str, list[NDArray]] = {name: [] for name in (*_TEXTS, *_NUMBERS, "source", "line", "step", "set", "begin", "end")}
        for number, (source, index) in enumerate(parts):
            n = len(index)
            codes = np.array([known.setdefault(name, len(known)) for name in index.names], dtype=np.int32)
            for name in _TEXTS:
                columns[name].append(codes[getattr(index, name)])
            if source.env:
                columns["env"][-1] = np.full(n, known.setdefault(source.env, len(known)), dtype=np.int32)
            for name in _NUMBERS:
                columns[name].append(getattr(index, name))
            columns["begin"].append(index.begins[:-1])
            columns["end"].append(index.begins[1:])
            columns["line"].append(np.arange(n, dtype=np.int32))
            for name, value in (("source", number), ("step", source.step), ("set", known.setdefault(source.set, len(known)))):
                columns[name].append(np.full(n, value, dtype=np.int32))
        self.columns = {name: np.concatenate(values) if values else np.empty(0, np.int32) for name, values in columns.items()}
        self.names = list(known)

    def __len__(self) -> int:
        return len(self.columns["source"])

    def text(self, column: str, row: int) -> str:
        """The text of a text column."""
        return self.names[self.columns[column][row]]

    @cached_property
    def failed(self) -> NDArray[np.bool_]:
        """[n] whether the rollout has no reward of its own."""
        ok = self.names.index("ok") if "ok" in self.names else -1
        return self.columns["status"] != ok

    def record(self, row: int) -> dict[str, Any]:
        """One rollout by the names of `rlx.rollout.record`, and `step`, `set`. Raises ConfigError if its file is gone or was replaced."""
        source = self.sources[self.columns["source"][row]]
        begin, end = int(self.columns["begin"][row]), int(self.columns["end"][row])
        try:
            with source.path.open("rb") as file:
                packed = _is_compressed(source.path)
                stream: Any = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True) if packed else file
                stream.seek(begin)
                record = msgspec.json.decode(stream.read(end - begin))
        except (OSError, zstandard.ZstdError, msgspec.DecodeError) as error:
            raise ConfigError(f"{source.path} has changed since it was listed ({error}); read it again") from error
        return {"step": source.step, "set": source.set, **_plain(record, source.env)}

    def same_example(self, row: int) -> NDArray[np.int64]:
        """Rows of the same example of the same environment and set, by step and member."""
        c = self.columns
        same = (c["example"] == c["example"][row]) & (c["env"] == c["env"][row]) & (c["set"] == c["set"][row])
        rows = np.flatnonzero(same)
        return rows[np.lexsort((c["member"][rows], c["group"][rows], c["step"][rows]))]


def _plain(record: Mapping[str, Any], env: str) -> dict[str, Any]:
    """A line in either layout, by the names of `rlx.rollout.record`."""
    if "num_tokens" in record:
        return dict(record)
    error = record.get("error")
    usage = record.get("token_usage") or {}
    return {
        **record,
        "env": record.get("env") or env,
        "group": None,
        "member": record.get("rollout"),
        "advantage": None,
        "num_tokens": usage.get("output_tokens"),
        "stop": record.get("stop_condition") or "",
        "truncated": record.get("is_truncated", False),
        "error": error.get("message") or error.get("error") if isinstance(error, Mapping) else error,
        "status": "ok" if error is None else "error",
        "seconds": (record.get("timing") or {}).get("total"),
    }


class Rollouts:
    """The rollouts of a directory, read part by part, so that a viewer can show what it has. Not for several threads at once."""

    def __init__(self, root: Path) -> None:
        """Raises ConfigError if there are none."""
        self.root = root
        self._parts: dict[Path, tuple[tuple[int, int], Source, RolloutIndex]] = {}
        self.sources = sources_of(root)

    def look(self) -> bool:
        """List the files again. Returns whether any is new, changed or gone."""
        before = {source.path for source in self.sources}
        self.sources = sources_of(self.root)
        now = {source.path for source in self.sources}
        self._parts = {path: part for path, part in self._parts.items() if path in now}
        return now != before or any(self._stale(source) for source in self.sources)

    def load(self) -> Iterator[int]:
        """Read the indices that are missing, newest step first. Yields the number of files that are read, after each."""
        for source in sorted(self.sources, key=lambda one: (one.set == TRAIN, one.step), reverse=True):
            if self._stale(source):
                try:
                    self._parts[source.path] = (source.stamp, source, index_source(source))
                except FileNotFoundError:  # a run that returned to a checkpoint has removed it
                    continue
            yield len(self._parts)

    def table(self) -> Table:
        """What is read so far."""
        return Table([self._parts[source.path][1:] for source in self.sources if source.path in self._parts])

    def whole(self) -> Table:
        """Everything."""
        for _ in self.load():
            pass
        return self.table()

    def _stale(self, source: Source) -> bool:
        try:
            return source.path not in self._parts or self._parts[source.path][0] != source.stamp
        except FileNotFoundError:
            return True
