"""Making a run directory ready for its next attempt: which checkpoint it starts from, and what of later steps is taken back.

After `rewind` the directory is as it was when that checkpoint was written: no record of a later step, no later policy version.
Knows files only, no processes; whoever calls holds the directory's lock.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rlx.checkpoints import folders
from rlx.checkpoints.folders import NoCheckpoint, Start
from rlx.config.errors import ConfigError
from rlx.config.load import load_run
from rlx.paths import RunPaths, atomic, write_text
from rlx.weights.files import WeightsError, verify, versions

LATEST = "latest"


def is_fork(resume: str | None) -> bool:
    """Whether `resume=` names another run, by a path."""
    return resume is not None and resume != LATEST and not resume.isdecimal()


def say(text: str) -> None:
    """To the console or the log of whoever starts the attempt."""
    print(text, file=sys.stderr, flush=True)


def find_fork(resume: str, warn: Callable[[str], None] = say) -> Start:
    """The checkpoint that a path names: its own folder, or a run directory whose newest one is taken. Raises ConfigError."""
    path = Path(resume).expanduser().absolute()
    try:
        if path.name.startswith("step_") and not RunPaths(path).config.is_file():  # a run may have such a name
            return folders.check(path)
        start = folders.newest(RunPaths(path), warn)
    except WeightsError as error:
        raise ConfigError(f"resume={resume} is no whole checkpoint: {error}\n  fix: name another one") from error
    if start is None:
        what = "has no checkpoint" if path.is_dir() else "does not exist"
        raise ConfigError(f"resume={resume}: {path} {what}.\n  fix: name a run directory that has one, or a folder checkpoints/step_N")
    return start


def source_of(start: Start) -> RunPaths:
    """The run directory that a checkpoint belongs to."""
    return RunPaths(start.checkpoint.parent.parent)


def rewind(paths: RunPaths, wanted: str = LATEST, warn: Callable[[str], None] = say, max_steps: int | None = None) -> Start | None:
    """Prepare the next attempt in a run's own directory: from the newest whole checkpoint, or that of step `wanted`.

    Without any checkpoint the run starts again from its beginning: None, or the checkpoint of another run that it was forked from.
    What later steps left is removed: metrics, rollouts, batches, policy versions, and checkpoints where an earlier one was asked for.
    Damaged checkpoints are renamed to `damaged_step_N`. `warn` is told about every such thing.
    Raises ConfigError, before anything is changed, when `wanted` is a step without a whole checkpoint or `max_steps` are done.
    """
    try:
        start = folders.newest(paths, warn) if wanted == LATEST else folders.at(paths, int(wanted))
    except NoCheckpoint as error:
        raise ConfigError(f"resume={wanted}: {error}.\n  fix: name one of those, or resume=latest") from error
    check_room(start, max_steps)
    done = start.step if start else 0
    for step in folders.discard_after(paths, done, keep_as_damaged=wanted == LATEST):
        warn(f"checkpoint {step} of {paths.root} was {'set aside as damaged' if wanted == LATEST else 'deleted'}")
    if start is None and is_fork(origin := load_run(paths.root, secrets=False).resume):
        assert origin is not None
        start = find_fork(origin, warn)
        done = start.step
    folders.write_start(paths, start)
    trim_metrics(paths, done, warn)
    for file in (*paths.rollouts.glob("step_*"), *paths.recorded.glob("step_*")):
        if int(file.name.removeprefix("step_").split(".")[0]) >= done:
            file.unlink()
    for file in (*paths.batches.glob("*"), *paths.endpoints.glob("*.json"), *paths.heartbeats.glob("*.json")):
        file.unlink()
    for file in (paths.preempt, paths.preempted):
        file.unlink(missing_ok=True)
    for folder in paths.weights.glob(".step_*"):
        shutil.rmtree(folder)
    for version in versions(paths):
        if version > done or (version == done and not _whole(paths.weights_of(version), warn)):
            shutil.rmtree(paths.weights_of(version))  # the trainer writes that of the checkpoint again
    return start


def has_begun(paths: RunPaths) -> bool:
    """Whether an attempt has left records or checkpoints, so that the next one must not start without `rewind`."""
    return paths.metrics.exists() or any(paths.checkpoints.glob("step_*"))


def check_room(start: Start | None, max_steps: int | None) -> None:
    """Raise ConfigError when a run of `max_steps` steps has nothing left to do after `start`."""
    if start is not None and max_steps is not None and start.step >= max_steps:
        raise ConfigError(
            f"there is nothing left to do: {start.checkpoint} is the state after {start.step} steps, and max_steps={max_steps}.\n"
            f"  fix: raise max_steps to go on, or name an earlier checkpoint with resume="
        )


def trim_metrics(paths: RunPaths, steps: int, warn: Callable[[str], None] = say) -> None:
    """Keep the records of the first `steps` steps, in their order; the file changes at once or not at all.

    From a line on that is no record (a full disk cut it, and the next record was appended to it) nothing is kept; `warn` is told.
    """
    if not paths.metrics.exists():
        return
    lines = paths.metrics.read_bytes().splitlines(keepends=True)
    kept: list[bytes] = []
    ends: list[int] = []  # of the kept lines, where they end in the old file
    read = 0
    trained: set[int] = set()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line) if line.endswith(b"\n") else {"step": steps}
            step = record["step"]
        except (ValueError, TypeError, KeyError):
            warn(f"{paths.metrics}, line {number} is no record: it and the {len(lines) - number} lines after it are removed")
            break
        read += len(line)
        if step < steps:
            kept.append(line)
            ends.append(read)
            if record.get("source") == "trainer":
                trained.add(step)
    missing = sorted(set(range(min(trained, default=steps), steps)) - trained)
    if missing:
        warn(f"{paths.metrics} has no record of step{'s' * (len(missing) > 1)} {', '.join(map(str, missing[:8]))}: the machine lost it")
    if len(kept) < len(lines):
        _forget_forwarded(paths, kept, ends)
        with atomic(paths.metrics) as temporary:
            temporary.write_bytes(b"".join(kept))


def _forget_forwarded(paths: RunPaths, kept: Sequence[bytes], ends: Sequence[int]) -> None:
    """What the trackers have forwarded, counted in the file that only the kept lines will be in."""
    if not paths.tracking.exists():
        return
    services = json.loads(paths.tracking.read_text())
    for service in services.values():
        service["forwarded"] = sum(len(line) for line, end in zip(kept, ends, strict=True) if end <= service.get("forwarded", 0))
    write_text(paths.tracking, json.dumps(services) + "\n")


def _whole(folder: Path, warn: Callable[[str], None]) -> bool:
    try:
        verify(folder)
    except WeightsError as error:
        warn(f"the weights of the checkpoint are exported again: {error}")
        return False
    return True
