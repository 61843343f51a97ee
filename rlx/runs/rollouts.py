"""The rollouts of a run or an evaluation, as rows for lists, and one by one as records.

Reads `rollouts/step_N.jsonl.zst`; `rollouts/finished.jsonl` of `rlx synthesize`; and `results.jsonl` in verifiers' layout, which
`rlx eval`, training runs and verifiers' own commands write. A row has no texts; they are read again when one rollout is asked for.
It writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from rlx.config.errors import ConfigError, may_read
from rlx.paths import RunPaths, step_of
from rlx.rollout.eval_results import RESULTS
from rlx.rollout.lines import lines_of, record_of

TRAIN, EVAL, SYNTHESIS = "train", "eval", "synthesis"
NONE = -1  # the step of a file whose path names none
DEPTH = 5  # folders below an evaluation's in which results are searched
_NO_FILE = (OSError, ValueError, zstandard.ZstdError)
_NO_ROLLOUT = (ValueError, TypeError, LookupError, AttributeError, msgspec.MsgspecError)  # what reading a stranger's line may raise


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFiles:
    """One file of rollouts."""

    path: Path
    set: str  # "train", "eval", or "eval MODEL" if there are several models
    step: int  # or NONE
    env: str = ""  # for lines that do not name their environment
    run: Path | None = None  # the run directory that it belongs to

    @property
    def stamp(self) -> tuple[int, int] | None:
        """Changes when the file is replaced or grows. None: it was removed."""
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return None
        return stat.st_mtime_ns, stat.st_size


class RolloutRow(
    msgspec.Struct, gc=False, rename={"example": "example_id", "tokens": "num_tokens", "turns": "num_turns", "rule": "left_out"}
):
    """What a list shows of a rollout, by the names of its columns and filters. None: the file does not say."""

    example: int
    env: str
    status: str  # ok, error, timeout or cancelled
    group: int | None = None
    member: int | None = None  # index in the group, or among the rollouts of an evaluated example
    reward: float | None = None
    advantage: float | None = None  # None, too: it was not trained on
    tokens: int | None = None  # sampled
    turns: int | None = None
    truncated: bool | None = None
    versions: list[int] = []  # every policy version that sampled one of its tokens
    stop: str | None = None
    rule: str | None = None  # the filter that dropped it
    source: Any = None  # its `RolloutFiles`
    line: Any = 0  # its number there

    def __post_init__(self) -> None:
        self.stop, self.rule = self.stop or "", self.rule or ""
        if self.reward is not None and math.isnan(self.reward):
            self.reward = None

    @property
    def step(self) -> int | None:
        return None if self.source.step == NONE else int(self.source.step)

    @property
    def set(self) -> str:
        return str(self.source.set)

    @property
    def version(self) -> int | None:
        """The newest policy version that sampled one of its tokens."""
        return max(self.versions, default=None)

    @property
    def error(self) -> bool:
        """Whether it has no reward of its own."""
        return self.status != "ok"

    @property
    def trained(self) -> bool:
        return self.advantage is not None

    def record(self) -> dict[str, Any]:
        """The rollout by the names of `rlx.rollout.record`, and `step`, `set`. Raises ConfigError if its file is gone or was replaced."""
        source: RolloutFiles = self.source
        try:
            (line,) = islice(lines_of(source.path), self.line, self.line + 1)
            return {**record_of(line, source.env), "step": source.step, "set": source.set}
        except (*_NO_FILE, *_NO_ROLLOUT) as error:
            raise ConfigError(f"{source.path} has changed since it was listed ({error}); read it again") from error


def same_example(rows: Sequence[RolloutRow], row: RolloutRow) -> list[RolloutRow]:
    """Rows of the same example of the same environment and set, by step and member."""
    same = [one for one in rows if (one.example, one.env, one.set) == (row.example, row.env, row.set)]
    return sorted(same, key=lambda one: (one.source.step, one.group or 0, one.member or 0))


def sources_of(root: Path) -> list[RolloutFiles]:
    """All files of rollouts of a run directory, of a folder with results, or the one file: training first, each by step.

    Raises ConfigError if there are none.
    """
    root = root.expanduser()
    paths = RunPaths(root)
    with may_read(root):
        if root.name == RESULTS and root.is_file():
            return _results([root], None)
        if root.is_file():
            return [
                RolloutFiles(path=root, set=TRAIN, step=_step(root), run=root.parent.parent if root.parent.name == "rollouts" else None)
            ]
        if not root.is_dir():
            raise ConfigError(f"there is no directory {root}.\n  fix: name a run directory; rlx runs lists them")
        run = root if paths.config.is_file() else None
        found = [RolloutFiles(path=path, set=TRAIN, step=_step(path), run=root) for path in sorted(paths.rollouts.glob("step_*.jsonl.zst"))]
        if paths.finished.is_file():
            found.append(RolloutFiles(path=paths.finished, set=SYNTHESIS, step=NONE, run=root))
        folder = paths.evaluations if paths.evaluations.is_dir() else root
        found += _results([path for depth in range(DEPTH + 1) for path in folder.glob("*/" * depth + RESULTS)], run)
    if not found:
        what = "(no step yet, or orchestrator.save_rollouts=false)" if run else f"and no {RESULTS} below it"
        raise ConfigError(f"{root} has no rollouts {what}.\n  fix: name another run, or the folder of an evaluation")
    return found


def _results(files: list[Path], run: Path | None) -> list[RolloutFiles]:
    """`step_20` and `step_9` sort as numbers."""
    several = len({_environment(path)[1] for path in files}) > 1
    found = []
    for path in sorted(files, key=lambda path: (path.parent.parent, _step(path.parent), path)):
        env, model = _environment(path)
        found.append(RolloutFiles(path=path, set=f"{EVAL} {model}" if several else EVAL, step=_step(path.parent), env=env, run=run))
    return found


def _environment(path: Path) -> tuple[str, str]:
    """Environment and model of results, from the nearest folder `<env>--<model>`."""
    names = (folder.name.partition("--") for folder in path.absolute().parents[:3])
    return next(((env, model) for env, found, model in names if found), ("", ""))


def _step(path: Path) -> int:
    step = step_of(path)
    return NONE if step is None else step


def rows_of(source: RolloutFiles) -> list[RolloutRow]:
    """The rows of one file. Raises ConfigError for a file that cannot be read, or has a line that is no rollout."""
    try:
        with may_read(source.path):
            return [_row(source, number, line) for number, line in enumerate(lines_of(source.path)) if line.strip()]
    except _NO_FILE as error:
        raise ConfigError(f"{source.path} cannot be read: {error}") from error


def _row(source: RolloutFiles, number: int, line: bytes) -> RolloutRow:
    try:
        row = msgspec.convert(record_of(line, source.env), RolloutRow)
    except _NO_ROLLOUT as error:
        raise ValueError(f"line {number + 1} is no rollout: {error}") from error
    row.source, row.line = source, number
    return row


class Rollouts:
    """The rollouts of a directory, read file by file, so that a viewer can show what it has. Not for several threads at once."""

    def __init__(self, root: Path) -> None:
        """Raises ConfigError if there are none."""
        self.root = root
        # What is known of each file, with its stamp: its rows, or why it cannot be read.
        self._files: dict[Path, tuple[tuple[int, int] | None, list[RolloutRow] | ConfigError]] = {}
        self.sources = sources_of(root)

    def look(self) -> bool:
        """List the files again. Returns whether any is new, changed or gone."""
        self.sources = sources_of(self.root)
        stamps = {source.path: source.stamp for source in self.sources}
        changed = stamps != {path: stamp for path, (stamp, _) in self._files.items()}
        self._files = {path: found for path, found in self._files.items() if path in stamps}
        return changed

    def load(self) -> Iterator[int]:
        """Read the files that are new or changed, newest step first. Yields the number of files that are read after each.

        A file that cannot be read is left out, and is one of the `problems`.
        """
        for number, source in enumerate(sorted(self.sources, key=lambda one: (one.set == TRAIN, one.step), reverse=True), 1):
            stamp = source.stamp
            if source.path not in self._files or self._files[source.path][0] != stamp:
                try:
                    self._files[source.path] = stamp, rows_of(source)
                except ConfigError as error:
                    self._files[source.path] = stamp, error
            yield number

    @property
    def problems(self) -> list[str]:
        """What is wrong with files that cannot be read."""
        return [str(found) for found in self._found() if isinstance(found, ConfigError)]

    def rows(self) -> list[RolloutRow]:
        """What is read so far."""
        return [row for found in self._found() if not isinstance(found, ConfigError) for row in found]

    def _found(self) -> list[list[RolloutRow] | ConfigError]:
        return [self._files[source.path][1] for source in self.sources if source.path in self._files]

    def whole(self) -> list[RolloutRow]:
        """Everything that can be read. Raises ConfigError if no file can."""
        for _ in self.load():
            pass
        if len(self.problems) == len(self.sources):
            raise ConfigError(self.problems)
        return self.rows()
