"""Checkpoints as folders: written whole or not at all, found, checked and pruned.

`checkpoints/step_N/` is the state after N training steps, when the policy has version N. It holds `trainer/`, `orchestrator/` and, written
last, `COMPLETE`: `{"step": N, "files": {name: {"size": bytes, …}}, …}`. While it is being written its name is
`.step_N.writing`; a folder of that name asks the orchestrator for its part. This module needs no torch and does not interpret the parts.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx.config.eval_envs import is_due, pins
from rlx.config.schema import Config, EvaluatedRun, TrainingRoot
from rlx.metrics import read_metrics
from rlx.paths import COMPLETE, RunPaths, listed, remove, write_text
from rlx.weights.files import WeightsError, verify

TRAINER = "trainer"
ORCHESTRATOR = "orchestrator"
WRITING = ".writing"
DELETED = ".deleted"

Manifest = Mapping[str, Mapping[str, Any]]
"""By file name, relative to the checkpoint: `size` in bytes; of the orchestrator's part `xxh3`, the hex digest of the content."""


class NoCheckpoint(ValueError):
    """The requested checkpoint does not exist. The message lists the existing ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where an attempt starts: the content of `start.json`."""

    step: int  # training steps done
    checkpoint: Path  # its folder, in this run directory or another


# finding


def steps(paths: RunPaths) -> list[int]:
    """Steps of the checkpoints that claim to be complete, oldest first."""
    return sorted(_number(path) for path in paths.checkpoints.glob("step_*") if listed(path / COMPLETE))


def newest(paths: RunPaths, warn: Callable[[str], None], *, digests: bool = True) -> Start | None:
    """The newest undamaged checkpoint, or None. Damaged ones are skipped with a warning. `digests`: whether every byte is checked."""
    for path in sorted(paths.checkpoints.glob("step_*"), key=_number, reverse=True):
        try:
            return check(path, digests=digests)
        except WeightsError as error:
            if not listed(path):  # its run is alive and has pruned it, so there is a newer one
                return newest(paths, warn, digests=digests)
            warn(f"skipping checkpoint {path.name}: {error}")
    return None


def at(paths: RunPaths, step: int) -> Start:
    """The checkpoint of this step. Raises NoCheckpoint if it is missing or damaged."""
    path = paths.checkpoint_of(step)
    if not path.is_dir():
        there = ", ".join(map(str, steps(paths))) or "none at all"
        raise NoCheckpoint(f"{paths.root} has no checkpoint of step {step}; it has those of: {there}")
    try:
        return check(path)
    except WeightsError as error:
        raise NoCheckpoint(f"checkpoint {path} is damaged: {error}") from error


def check(path: Path, *, digests: bool = True) -> Start:
    """Compare a checkpoint with its manifest; with `digests` every byte of it, otherwise names and sizes.

    Raises WeightsError naming the file and the problem.
    """
    manifest = verify(path, digests=digests)
    if not isinstance(manifest.get("step"), int):
        raise WeightsError(f"{path / COMPLETE} names no step; it is not a checkpoint")
    return Start(step=manifest["step"], checkpoint=path.absolute())


def _number(path: Path) -> int:
    number = path.name.removeprefix("step_")
    return int(number) if number.isdecimal() else -1


# what an attempt starts from


def write_start(paths: RunPaths, start: Start | None) -> None:
    """Tell the roles of the next attempt where to start; None: from version 0."""
    if start is None:
        paths.start.unlink(missing_ok=True)
    else:
        write_text(paths.start, json.dumps({"step": start.step, "checkpoint": str(start.checkpoint)}) + "\n")


def read_start(paths: RunPaths) -> Start | None:
    """Where this attempt starts; None: from version 0."""
    if not paths.start.exists():
        return None
    record = json.loads(paths.start.read_text())
    return Start(step=record["step"], checkpoint=Path(record["checkpoint"]))


# writing


def writing(paths: RunPaths, step: int) -> Path:
    """The folder's name while it is being written."""
    final = paths.checkpoint_of(step)
    return final.with_name(f".{final.name}{WRITING}")


def begin(paths: RunPaths, step: int) -> Path:
    """Make the empty folder of a checkpoint under its hidden name. Replaces one that was never finished."""
    folder = writing(paths, step)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def being_written(paths: RunPaths) -> Iterator[tuple[int, Path]]:
    """Steps and folders of the checkpoints being written."""
    for folder in paths.checkpoints.glob(f".step_*{WRITING}"):
        yield _number(folder.with_name(folder.name.removeprefix(".").removesuffix(WRITING))), folder


def finish(paths: RunPaths, step: int, files: Manifest, facts: Mapping[str, Any]) -> Path:
    """Write the marker and make the checkpoint appear. Returns its folder. Replaces an older checkpoint of the same step.

    Marker and names are synced to disk before it returns, so they survive a crash of the machine.
    """
    folder, final = writing(paths, step), paths.checkpoint_of(step)
    with (folder / COMPLETE).open("w") as file:
        file.write(json.dumps({"step": step, **facts, "files": files}) + "\n")
        file.flush()
        os.fsync(file.fileno())
    for part in (folder / TRAINER, folder / ORCHESTRATOR, folder):
        if part.is_dir():
            sync(part)
    if final.exists() or final.is_symlink():
        _delete(final)
    folder.rename(final)
    sync(final.parent)
    return final


def adopt(paths: RunPaths, start: Start) -> Start:
    """Keep another run's checkpoint in this run, so that the other run's pruning cannot remove it. Hard links take no extra space.

    Without hard links on the file system, the checkpoint stays where it is. Raises NoCheckpoint if it is gone.
    """
    folder = begin(paths, start.step)
    try:
        shutil.copytree(start.checkpoint, folder, copy_function=os.link, dirs_exist_ok=True)
    except OSError as error:
        shutil.rmtree(folder)
        if not (start.checkpoint / COMPLETE).is_file():
            raise NoCheckpoint(f"{start.checkpoint} was deleted meanwhile") from error
        return start
    final = paths.checkpoint_of(start.step)
    folder.rename(final)
    return Start(step=start.step, checkpoint=final.absolute())


def abandon(paths: RunPaths, step: int) -> None:
    """Delete what was written of a checkpoint that cannot be finished, to free its space. The orchestrator may be writing its part."""
    with contextlib.suppress(OSError):
        _delete(writing(paths, step))


def prune(paths: RunPaths, keep_last: int | None, keep_interval: int | None, protect: Collection[int] = ()) -> list[int]:
    """Delete all checkpoints except the newest `keep_last` (None: delete none), multiples of `keep_interval`, and those in `protect`.

    Returns the deleted steps.
    """
    if keep_last is None:
        return []
    gone = [step for step in steps(paths)[:-keep_last] if step not in protect and not (keep_interval and step % keep_interval == 0)]
    for step in gone:
        _delete(paths.checkpoint_of(step))
    return gone


def discard_after(paths: RunPaths, step: int, *, keep_as_damaged: bool) -> list[int]:
    """Delete an earlier attempt's unfinished folders and its checkpoints of steps after `step`. Returns the steps of those checkpoints.

    With `keep_as_damaged`, those checkpoints are renamed to `damaged_step_N` for inspection instead.
    """
    later = sorted(_number(path) for path in paths.checkpoints.glob("step_*") if _number(path) > step)
    for number in later:
        path = paths.checkpoint_of(number)
        if keep_as_damaged:
            aside = path.with_name(f"damaged_{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
        else:
            _delete(path)
    for path in [*paths.checkpoints.glob(f".*{WRITING}"), *paths.checkpoints.glob(f".*{DELETED}")]:
        remove(path)
    return later


def _delete(path: Path) -> None:
    """Delete a folder. It is renamed first, so no reader finds half of it. Of a link, which a user has made, the target stays."""
    if path.is_symlink():
        path.unlink()
        return
    doomed = path.with_name(f".{path.name}{DELETED}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


def sync(path: Path) -> None:
    """Return when a file's content, or a folder's names, would survive a crash of the machine."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# the best checkpoint by a metric of an evaluation, and the versions that wait for theirs: `metrics.jsonl` decides, and a rewind removes the
# records of later steps, so a resumed run knows as the best what was best at its starting step


def best_of(paths: RunPaths, metric: str) -> tuple[float, int] | None:
    """The highest value of the metric over all evaluations whose step has a checkpoint, and that step; the later one of equals."""
    return _best(_evaluations(paths), steps(paths), metric)


def kept(paths: RunPaths, metric: str, due: Callable[[int], bool]) -> set[int]:
    """The steps whose checkpoints must stay: the best one, and those that wait for their evaluation (any record of it ends the wait).

    `due`: whether the version of a step is evaluated.
    """
    # Read once: a record that another process writes meanwhile would end a step's wait without making it the best.
    records, there = _evaluations(paths), steps(paths)
    done = max((record["step"] for record in records), default=-1)
    waiting = {step for step in there if step > done and due(step)}
    best = _best(records, there, metric)
    return waiting if best is None else {*waiting, best[1]}


def not_evaluated(cfg: TrainingRoot, paths: RunPaths, newest: int) -> set[int]:
    """The versions up to `newest` whose evaluation is due and has no record: a killed run evaluates them when it resumes.

    Evaluations of `rlx sft` may be any number of steps behind, and those of `rlx train` that do not hold back the updates.
    """
    if not isinstance(cfg, EvaluatedRun) or not cfg.generates_rollouts or (isinstance(cfg, Config) and pins(cfg)):
        return set()  # updates wait for an evaluation, so `versions_kept` is enough
    done = {record["step"] for record in _evaluations(paths)}
    return {version for version in range(newest + 1) if is_due(cfg, version)} - done


def _evaluations(paths: RunPaths) -> list[dict[str, Any]]:
    return [record for record, _ in read_metrics(paths.metrics) if record["source"] == "eval"]


def _best(records: Iterable[dict[str, Any]], there: Collection[int], metric: str) -> tuple[float, int] | None:
    last = {record["step"]: record[metric] for record in records if metric in record}  # the last record of a step counts
    return max(((value, step) for step, value in last.items() if step in there), default=None)
