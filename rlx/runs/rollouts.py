"""The rollouts of a run or an evaluation, as a table of numbers for lists, and one by one as records.

Reads `rollouts/step_N.jsonl.zst`; `rollouts/finished.jsonl` of `rlx synthesize`; and `results.jsonl` in verifiers' layout, which
`rlx eval`, training runs and verifiers' own commands write. The table holds about 80 bytes a rollout; texts stay on the disk until one
rollout is asked for. It writes nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from rlx.config.errors import ConfigError, may_read
from rlx.config.schema import SftRoot
from rlx.rollout.index import NONE, Indexer, RolloutIndex, decoded
from rlx.rollout.results import METADATA, RESULTS
from rlx.runs.run import Run

TRAIN, EVAL, SYNTHESIS = "train", "eval", "synthesis"
PART, PAUSE = 1000, 0.25  # a file that is still being read is shown after this many lines and seconds
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
    with may_read(root):
        return _sources_in(root)


def _sources_in(root: Path) -> list[Source]:
    if root.is_file():
        return [_single(root)]
    if not root.is_dir():
        raise ConfigError(f"there is no directory {root}.\n  fix: name a run directory; rlx runs lists them")
    run = Run(root)
    paths = run.paths
    trained = sorted(paths.rollouts.glob("step_*.jsonl.zst")) if paths.rollouts.is_dir() else []
    found = [Source(path=path, set=TRAIN, step=_number(path.name), run=root) for path in trained]
    if paths.finished.is_file():
        found.append(Source(path=paths.finished, set=SYNTHESIS, step=NONE, run=root))
    found += _results(paths.evaluations if paths.evaluations.is_dir() else root, root if paths.config.is_file() else None)
    if not found and paths.config.is_file() and run.command == "sft" and isinstance(cfg := run.config, SftRoot) and not cfg.plays:
        raise ConfigError(
            f"{root} has no rollouts: it is a run of `rlx sft` without evaluations, so nothing was played.\n"
            f"  fix: rlx report {root} shows its curves; env=NAME eval.interval=N evaluates beside such training"
        )
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
    """Files of results below a folder. Skips folders that may not be read."""
    try:
        if (folder / RESULTS).is_file():
            yield folder / RESULTS
        elif depth:
            for inner in folder.iterdir():
                if inner.is_dir() and not inner.is_symlink():
                    yield from _search(inner, depth - 1)
    except PermissionError:
        return


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


def index_source(source: Source) -> Iterator[RolloutIndex]:
    """Indices of what is read of a file so far. The last one is whole.

    Raises ConfigError for a file that holds no rollouts.
    """
    try:
        indexer, shown = Indexer(), time.monotonic()
        for number, line in enumerate(_lines(source.path), 1):
            indexer.add(line)
            if number % PART == 0 and time.monotonic() - shown > PAUSE:
                yield indexer.done()
                shown = time.monotonic()
        yield indexer.done()
    except FileNotFoundError:
        raise
    except (ValueError, OSError, zstandard.ZstdError) as error:
        raise ConfigError(f"{source.path} cannot be read: {error}") from error


LONGEST = 256 << 20  # bytes of a line


def _is_compressed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == zstandard.FRAME_HEADER


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file with their line breaks, a few MB in memory at a time. An unfinished last line of a growing file is left out.

    Raises ValueError if a compressed file ends within a frame: rlx writes them whole, so a part of it is missing.
    """
    with path.open("rb") as file:
        packed, rest = _is_compressed(path), b""
        if not packed and path.suffix == ".zst":
            raise ValueError("it is no zstd file")
        for block in _decompressed(file) if packed else iter(partial(file.read, 1 << 20), b""):
            *whole, rest = (rest + block).split(b"\n")
            if len(rest) > LONGEST:
                raise ValueError(f"it has a line of more than {LONGEST >> 20} MiB, and no rollout is that long")
            yield from (line + b"\n" for line in whole)
        if rest and packed:
            yield rest


def _decompressed(file: BinaryIO) -> Iterator[bytes]:
    """The content of all frames of a file. Raises ValueError if the file ends within one."""
    frame: Any = None  # None: between two frames
    while packed := file.read(1 << 12):  # of which zstd can make 128 MiB
        while packed:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(packed)
            packed = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise ValueError("the file is cut off: it ends within its compressed data")


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
                record = decoded(stream.read(end - begin))
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
    if about := record.get("about"):  # a synthesis
        first, *more = record["transcripts"] or [{}]
        rest = [message for one in more for message in (*_messages(one["prompt"]), *_messages(one["completion"]))]
        said = [*_messages(first.get("completion")), *rest] if rest else first.get("completion")
        status = {"status": "error" if record["failed"] else "ok", "prompt": first.get("prompt"), "completion": said}
        return {**record, **about, **status, "reward": None if record["failed"] else record["reward"]}
    error = record.get("error")
    usage, timing = (found if isinstance(found := record.get(name), Mapping) else {} for name in ("token_usage", "timing"))
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
        "seconds": timing.get("total"),
    }


def _messages(said: Any) -> list[Any]:
    """The messages of a part of a transcript, which is a `str` for raw text."""
    return said if isinstance(said, list) else [] if said is None else [said]


class Rollouts:
    """The rollouts of a directory, read part by part, so that a viewer can show what it has. Not for several threads at once."""

    def __init__(self, root: Path) -> None:
        """Raises ConfigError if there are none."""
        self.root = root
        self._parts: dict[Path, tuple[tuple[int, int] | None, Source, RolloutIndex]] = {}  # stamp; None: not all of it
        self._problems: dict[Path, tuple[tuple[int, int], str]] = {}  # of files that cannot be read, with their stamps
        self.sources = sources_of(root)

    @property
    def problems(self) -> list[str]:
        """What is wrong with files that cannot be read, in their order. Call `load` before."""
        return [self._problems[source.path][1] for source in self.sources if source.path in self._problems]

    def look(self) -> bool:
        """List the files again. Returns whether any is new, changed or gone."""
        before = {source.path for source in self.sources}
        self.sources = sources_of(self.root)
        now = {source.path for source in self.sources}
        self._parts = {path: part for path, part in self._parts.items() if path in now}
        self._problems = {path: problem for path, problem in self._problems.items() if path in now}
        return now != before or any(self._stale(source) for source in self.sources)

    def load(self) -> Iterator[int]:
        """Read the indices that are missing, newest step first. Yields the number of whole files, whenever there is more to show.

        A file that cannot be read is left out, and is one of the `problems`.
        """
        for source in sorted(self.sources, key=lambda one: (one.set == TRAIN, one.step), reverse=True):
            if self._stale(source):
                stamp = None
                try:
                    stamp = source.stamp
                    self._problems.pop(source.path, None)
                    for index in index_source(source):
                        self._parts[source.path] = (None, source, index)
                        yield len(self._parts) - 1
                    self._parts[source.path] = (stamp, source, self._parts[source.path][2])
                except FileNotFoundError:  # a run that returned to a checkpoint has removed it
                    continue
                except ConfigError as error:
                    self._parts.pop(source.path, None)  # the part before the damage is not the whole file
                    if stamp is not None:
                        self._problems[source.path] = (stamp, str(error))
            yield len(self._parts)

    def table(self) -> Table:
        """What is read so far."""
        return Table([self._parts[source.path][1:] for source in self.sources if source.path in self._parts])

    def whole(self) -> Table:
        """Everything that can be read. Raises ConfigError if no file can."""
        for _ in self.load():
            pass
        if self.problems and not self._parts:
            raise ConfigError(self.problems)
        return self.table()

    def _stale(self, source: Source) -> bool:
        try:
            if source.path in self._problems:
                return self._problems[source.path][0] != source.stamp
            return source.path not in self._parts or self._parts[source.path][0] != source.stamp
        except FileNotFoundError:
            return True
