"""The rollouts of a run or an evaluation, as a table of numbers for lists, and one by one as records.

Reads `rollouts/step_N.jsonl.zst`; `rollouts/finished.jsonl` of `rlx synthesize`; and `results.jsonl` in verifiers' layout, which
`rlx eval`, training runs and verifiers' own commands write. The table holds about 150 bytes a rollout; texts stay on the disk until one
rollout is asked for. It writes nothing.
"""

from __future__ import annotations

import json
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
from rlx.paths import RunPaths
from rlx.rollout.lines import NONE, columns_of_lines, decoded
from rlx.rollout.results import METADATA, RESULTS

TRAIN, EVAL, SYNTHESIS = "train", "eval", "synthesis"
LONGEST = 256 << 20  # bytes of a line
DEPTH = 5  # folders below an evaluation's in which results are searched


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
    paths = RunPaths(root)
    trained = sorted(paths.rollouts.glob("step_*.jsonl.zst")) if paths.rollouts.is_dir() else []
    found = [Source(path=path, set=TRAIN, step=_number(path.name), run=root) for path in trained]
    if paths.finished.is_file():
        found.append(Source(path=paths.finished, set=SYNTHESIS, step=NONE, run=root))
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


def columns_of(source: Source) -> dict[str, NDArray]:
    """The columns of the rollouts of one file, each [n]. Raises ConfigError for a file that cannot be read or holds no rollouts."""
    try:
        with may_read(source.path):
            columns = columns_of_lines(_lines(source.path))
    except FileNotFoundError:
        raise
    except (ValueError, OSError, zstandard.ZstdError) as error:
        raise ConfigError(f"{source.path} cannot be read: {error}") from error
    n = len(columns["line"])
    if source.env:
        columns["env"] = np.full(n, source.env, dtype=object)
    return {**columns, "step": np.full(n, source.step), "set": np.full(n, source.set, dtype=object)}


def _is_compressed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == zstandard.FRAME_HEADER


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file with their line breaks, a few MB in memory at a time. An unfinished last line of a growing file is left out.

    Raises ValueError if a compressed file is cut off: rlx writes them whole, so a part of it is missing.
    """
    packed, rest = _is_compressed(path), b""
    if not packed and path.suffix == ".zst":
        raise ValueError("it is no zstd file")
    with path.open("rb") as file:
        for block in _decompressed(file) if packed else iter(partial(file.read, 1 << 20), b""):
            *whole, rest = (rest + block).split(b"\n")
            if len(rest) > LONGEST:
                raise ValueError(f"it has a line of more than {LONGEST >> 20} MiB, and no rollout is that long")
            yield from (line + b"\n" for line in whole)


def _decompressed(file: BinaryIO) -> Iterator[bytes]:
    """The content of a file's frame. Raises ValueError if the file ends within it."""
    frame = zstandard.ZstdDecompressor().decompressobj()
    while packed := file.read(1 << 12):  # of which zstd can make 128 MiB
        yield frame.decompress(packed)
    if not frame.eof:
        raise ValueError("the file is cut off: it ends within its compressed data")


class Table:
    """The columns of all rollouts read so far, n rows: those of `columns_of`, and `source`, an index into `sources`."""

    def __init__(self, parts: Sequence[tuple[Source, Mapping[str, NDArray]]]) -> None:
        self.sources = [source for source, _ in parts]
        files = [{**columns, "source": np.full(len(columns["line"]), number)} for number, (_, columns) in enumerate(parts)]
        self.columns = {name: np.concatenate([each[name] for each in files]) for name in files[0]} if files else {}

    def __len__(self) -> int:
        return len(self.columns.get("source", ()))

    def text(self, column: str, row: int) -> str:
        """The text of a text column."""
        return str(self.columns[column][row])

    @cached_property
    def failed(self) -> NDArray[np.bool_]:
        """[n] whether the rollout has no reward of its own."""
        return self.columns["status"] != "ok"

    def record(self, row: int) -> dict[str, Any]:
        """One rollout by the names of `rlx.rollout.record`, and `step`, `set`. Raises ConfigError if its file is gone or was replaced."""
        source = self.sources[self.columns["source"][row]]
        begin, end = int(self.columns["begin"][row]), int(self.columns["end"][row])
        try:
            with source.path.open("rb") as file:
                stream: Any = zstandard.ZstdDecompressor().stream_reader(file) if _is_compressed(source.path) else file
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
    """The rollouts of a directory, read file by file, so that a viewer can show what it has. Not for several threads at once."""

    def __init__(self, root: Path) -> None:
        """Raises ConfigError if there are none."""
        self.root = root
        # What is known of each file, with its stamp: its columns, or why it cannot be read.
        self._files: dict[Path, tuple[tuple[int, int], dict[str, NDArray] | ConfigError]] = {}
        self.sources = sources_of(root)

    @property
    def problems(self) -> list[str]:
        """What is wrong with files that cannot be read, in their order. Call `load` before."""
        return [str(found) for _, found in self._found() if isinstance(found, ConfigError)]

    def _found(self) -> list[tuple[Source, dict[str, NDArray] | ConfigError]]:
        return [(source, self._files[source.path][1]) for source in self.sources if source.path in self._files]

    def look(self) -> bool:
        """List the files again. Returns whether any is new, changed or gone."""
        before = {source.path for source in self.sources}
        self.sources = sources_of(self.root)
        now = {source.path for source in self.sources}
        self._files = {path: found for path, found in self._files.items() if path in now}
        return now != before or any(self._stale(source) for source in self.sources)

    def load(self) -> Iterator[int]:
        """Read the files that are missing, newest step first. Yields the number of files after each.

        A file that cannot be read is left out, and is one of the `problems`.
        """
        for source in sorted(self.sources, key=lambda one: (one.set == TRAIN, one.step), reverse=True):
            if self._stale(source):
                try:
                    stamp = source.stamp
                    self._files[source.path] = stamp, columns_of(source)
                except FileNotFoundError:  # a run that returned to a checkpoint has removed it
                    continue
                except ConfigError as error:
                    self._files[source.path] = stamp, error
            yield len(self._files)

    def table(self) -> Table:
        """What is read so far."""
        return Table([(source, found) for source, found in self._found() if not isinstance(found, ConfigError)])

    def whole(self) -> Table:
        """Everything that can be read. Raises ConfigError if no file can."""
        for _ in self.load():
            pass
        if len(self.problems) == len(self._files) > 0:
            raise ConfigError(self.problems)
        return self.table()

    def _stale(self, source: Source) -> bool:
        try:
            return source.path not in self._files or self._files[source.path][0] != source.stamp
        except FileNotFoundError:
            return True
