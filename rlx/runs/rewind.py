"""Prepares a run directory for its next attempt: chooses the checkpoint to start from and removes everything of later steps.

After `rewind` the directory is as it was when that checkpoint was written: no record of a later step, no later policy version.
The caller must hold the directory's lock.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlx.checkpoints import folders
from rlx.checkpoints.folders import NoCheckpoint, Start
from rlx.checkpoints.forked import write_forked
from rlx.config.errors import ConfigError
from rlx.config.eval_envs import is_due
from rlx.config.load import load_command
from rlx.config.run_config import is_fork
from rlx.config.schema import CommandConfig, EvaluatedRun, TrainingRoot
from rlx.heartbeat import INTERVAL
from rlx.invocation import program
from rlx.lock import FileLock
from rlx.metrics import read_metrics
from rlx.paths import RunPaths, atomic, remove, step_of, write_text
from rlx.runs import own_code
from rlx.runs.config_diff import changed_keys
from rlx.weights import tmpfs
from rlx.weights.files import WeightsError, verify, versions

LATEST = "latest"
SIZES = ("hidden_size", "num_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "num_experts", "vocab_size")
GLIMPSE = 0.2  # seconds: a role that is refused at the same time holds the lock for a moment, which does not mean that the run lives


def say(text: str) -> None:
    """Print to stderr: the console, or the log of the process that starts the attempt."""
    print(text, file=sys.stderr, flush=True)


def find_fork(resume: str, warn: Callable[[str], None] = say, *, digests: bool = True) -> Start:
    """The checkpoint at a path: a checkpoint folder, or the newest one of a run directory. Raises ConfigError if there is none.

    `digests`: whether every byte is checked.
    """
    path = Path(resume).expanduser().absolute()
    try:
        if path.name.startswith("step_") and not RunPaths(path).config.is_file():  # a run directory may have such a name, too
            return folders.check(path, digests=digests)
        start = folders.newest(RunPaths(path), warn, digests=digests)
    except WeightsError as error:
        raise ConfigError(f"resume={resume} is no complete checkpoint: {error}\n  fix: name another one") from error
    if start is None:
        what = "has no checkpoint" if path.is_dir() else "does not exist"
        raise ConfigError(f"resume={resume}: {path} {what}.\n  fix: name a run directory that has one, or a folder checkpoints/step_N")
    return start


def source_of(start: Start) -> RunPaths:
    """The run directory of a checkpoint."""
    return RunPaths(start.checkpoint.parent.parent)


def check_fork(start: Start, cfg: CommandConfig, warn: Callable[[str], None] = say) -> None:
    """Raise ConfigError if a run cannot start from another one's checkpoint: it has no step left, or its model has other sizes.

    Calls `warn` if only the model's name differs. A fork trains the checkpoint's model, whatever `model` says: the memory estimate and
    `config.yaml` would be about another one.
    """
    check_room(start, cfg.total_steps)
    source = source_of(start).root
    try:
        there = load_command(source, secrets=False).model
    except ConfigError:  # of an older version
        return
    here = cfg.model
    sizes = {f"model.{name}": (getattr(there, name), getattr(here, name)) for name in SIZES}
    known = {key: both for key, both in sizes.items() if None not in both or key == "model.num_experts"}
    if other := [f"{key}: {old} ≠ {new}" for key, (old, new) in known.items() if old != new]:
        raise ConfigError(
            f"resume={start.checkpoint} holds the model of that run, model.name={there.name}, and model.name={here.name} has other sizes "
            f"(there ≠ here): {', '.join(other)}.\n  fix: choose that run's model, or leave out resume= to begin with {here.name}"
        )
    if there.name != here.name:
        warn(f"{cfg.run.dir}: model.name={here.name} changes no weights: the run starts from those of {start.checkpoint}")


def note_fork(paths: RunPaths, start: Start, cfg: CommandConfig, options: Mapping[str, Path]) -> RunPaths:
    """Record which run a new one is forked from, and say what it changes. Returns that run's directory."""
    source = source_of(start)
    try:
        before = load_command(source.root, secrets=False)
    except ConfigError:  # of an older version
        before = None
    write_forked(paths, source, start.step, before if isinstance(before, TrainingRoot) else None)
    if isinstance(before, TrainingRoot):
        changed = ", ".join([*changed_keys(before, cfg), *own_code.changed(source, cfg, options)]) or "the same configuration"
        say(f"{paths.root}: starts from step {start.step} of {source.root}, with {changed} (docs/resume.md: what other data mean)")
    return source


def find_start(paths: RunPaths, wanted: str = LATEST, warn: Callable[[str], None] = say) -> Start | None:
    """The newest complete checkpoint of a run, or that of step `wanted`. Reads all of it and changes nothing.

    Raises ConfigError if `wanted` is a step without a complete checkpoint, or if all checkpoints are damaged.
    """
    if not load_command(paths.root, secrets=False).has_checkpoints:
        return None
    try:
        start = folders.newest(paths, warn) if wanted == LATEST else folders.at(paths, int(wanted))
    except NoCheckpoint as error:
        raise ConfigError(f"resume={wanted}: {error}.\n  fix: name one of those, or resume=latest") from error
    if start is None and (damaged := sorted(path.name for path in paths.checkpoints.glob("*step_*") if path.name[0] != ".")):
        raise ConfigError(
            f"every checkpoint of {paths.root} is damaged: {', '.join(damaged)}. Starting at step 0 would delete its metrics, rollouts "
            f"and {len(versions(paths.weights))} policy versions in {paths.weights}.\n"
            "  fix: restore a checkpoint's files; or move or delete the folder, and the run starts anew"
        )
    return start


def rewind(paths: RunPaths, wanted: str = LATEST, warn: Callable[[str], None] = say, max_steps: int | None = None) -> Start | None:
    """Prepare the next attempt in a run's own directory, from the newest complete checkpoint or that of step `wanted`.

    Without any checkpoint the run restarts from its beginning: returns `None`, or the checkpoint of the run that it was forked from.
    Removes everything of later steps: metrics, rollouts, batches, evaluations, policy versions, and, if `wanted` is a step, later
    checkpoints.
    A command without checkpoints (`rlx eval`) keeps all its records: its role continues after the last one.
    Renames damaged checkpoints to `damaged_step_N`. Calls `warn` with a line about each removed or renamed checkpoint and lost record.
    Raises ConfigError, before any change, if `wanted` is a step without a complete checkpoint, if all checkpoints are damaged, or if
    `max_steps` steps are already done.
    """
    cfg = load_command(paths.root, secrets=False)
    if not cfg.has_checkpoints:
        _forget_processes(paths)
        return None
    start = find_start(paths, wanted, warn)
    check_room(start, max_steps)
    done = start.step if start else 0
    for step in folders.discard_after(paths, done, keep_as_damaged=wanted == LATEST):
        warn(f"checkpoint {step} of {paths.root} was {'set aside as damaged' if wanted == LATEST else 'deleted'}")
    if start is None and cfg.resume is not None and is_fork(cfg.resume):
        start = find_fork(cfg.resume, warn)
        done = start.step
    folders.write_start(paths, start)
    trim_metrics(paths, done, warn)
    _trim_updates(paths, done)
    for place in _of_steps(paths):
        if (step_of(place) or 0) >= done:
            remove(place)
    _forget_processes(paths)
    tmpfs.clear(paths.weights)
    for folder in paths.weights.glob(".step_*"):
        remove(folder)
    for version in versions(paths.weights):
        if version > done or (version == done and (done == 0 or not _whole(paths.weights_of(version), warn))):
            tmpfs.delete(paths.weights_of(version))  # the trainer publishes the version that it starts from again
    return start


def _of_steps(paths: RunPaths) -> list[Path]:
    """What belongs to one step each, as its name says: rollouts, batches, results of an evaluation, replays."""
    return [
        *paths.rollouts.glob("step_*"),
        *paths.recorded.glob("step_*"),
        *paths.evaluations.glob("*/step_*"),
        *paths.replays.glob("step_*--*"),
    ]


def _forget_processes(paths: RunPaths) -> None:
    """Remove what the processes of the last attempt left for each other."""
    for file in (*paths.batches.glob("*"), *paths.endpoints.glob("*.json"), *paths.heartbeats.glob("*.json")):
        file.unlink(missing_ok=True)  # another host may have deleted it, and this one still lists it
    for file in (paths.preempt, paths.preempted):
        file.unlink(missing_ok=True)


def has_begun(paths: RunPaths) -> bool:
    """Whether an attempt has written records or checkpoints; if so, the next attempt needs `rewind` first."""
    return paths.metrics.exists() or any(paths.checkpoints.glob("step_*"))


def refuse_ended(paths: RunPaths, lock: FileLock) -> None:
    """Raise ConfigError if a run has begun and all its roles have ended. A role that joins it starts at version 0, whatever is there.

    It would write records of the same steps again, and the servers would sample with the newest version of the roles before it. `lock`:
    the directory's, not held yet. Where it does not show processes of other hosts, roles may live there, and nothing is refused. Some file
    systems keep locks to a host without a word, so heartbeats count, too.
    """
    there = versions(paths.weights)
    if not (has_begun(paths) or there) or _beats(paths) or not lock.take(GLIMPSE) or not lock.sees_other_hosts:
        return
    lock.close()
    what = f"it has policy versions up to {there[-1]}" if there else f"it has records, {paths.metrics}, or checkpoints"
    continued = f"{program()} --config-dir {shlex.quote(str(paths.root))} --config-name config resume=latest"
    raise ConfigError(
        f"{paths.root} holds a run whose roles have all ended: {what}, and a role started separately begins at version 0.\n"
        f"  fix: continue it with `{continued}`; or give another run.dir="
    )


def _beats(paths: RunPaths) -> bool:
    """Whether a role of the run writes heartbeats."""

    def times() -> dict[str, int]:
        return {file.name: file.stat().st_mtime_ns for file in paths.heartbeats.glob("*.json")}

    try:
        before = times()
        time.sleep(3 * INTERVAL if before else 0)
        return times() != before
    except FileNotFoundError:  # one is being replaced
        return True


def check_room(start: Start | None, max_steps: int | None) -> None:
    """Raise ConfigError if a run of `max_steps` steps has no step left after `start`."""
    if start is not None and max_steps is not None and start.step >= max_steps:
        raise ConfigError(
            f"there is nothing left to do: {start.checkpoint} is the state after {start.step} steps, and max_steps={max_steps}.\n"
            f"  fix: raise max_steps, or name an earlier checkpoint with resume="
        )


def lacks_last_evaluation(paths: RunPaths, cfg: CommandConfig) -> bool:
    """Whether the last version is to be evaluated and has no record: the run was killed then, so something is left to do."""
    if not isinstance(cfg, EvaluatedRun) or not is_due(cfg, cfg.max_steps):
        return False
    return cfg.max_steps not in (record["step"] for record, _ in read_metrics(paths.metrics) if record["source"] == "eval")


def _trim_updates(paths: RunPaths, version: int) -> None:
    """Keep the weight syncs up to this version: the later ones are undone, and a line that was cut short is none."""
    if not paths.updates.exists():
        return
    whole = [line for line in paths.updates.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    with atomic(paths.updates) as temporary:
        temporary.write_bytes(b"".join(line for line in whole if json.loads(line)["version"] <= version))


def trim_metrics(paths: RunPaths, steps: int, warn: Callable[[str], None] = say) -> None:
    """Keep only the records of the first `steps` steps, in their order; replaces the file atomically.

    The first corrupt line and everything after it are dropped, with a warning. (A full disk can cut a line short.)
    """
    if not paths.metrics.exists():
        return
    lines = paths.metrics.read_bytes().splitlines(keepends=True)
    kept: list[bytes] = []
    ends: list[int] = []  # end offset of each kept line in the old file, in bytes
    read = 0
    for number, line in enumerate(lines, 1):
        try:
            step = json.loads(line)["step"] if line.endswith(b"\n") else steps
        except (ValueError, TypeError, KeyError):
            warn(f"{paths.metrics}, line {number} is corrupt: it and the {len(lines) - number} lines after it are removed")
            break
        read += len(line)
        if step < steps:
            kept.append(line)
            ends.append(read)
    if len(kept) < len(lines):
        _forget_forwarded(paths, kept, ends, steps)
        with atomic(paths.metrics) as temporary:
            temporary.write_bytes(b"".join(kept))


def _forget_forwarded(paths: RunPaths, kept: Sequence[bytes], ends: Sequence[int], steps: int) -> None:
    """Recompute the trackers' forwarded byte counts for a metrics file that holds only the kept lines, of the first `steps` steps."""
    if not paths.tracking.exists():
        return
    services = json.loads(paths.tracking.read_text())
    for service in services.values():
        service["forwarded"] = sum(len(line) for line, end in zip(kept, ends, strict=True) if end <= service.get("forwarded", 0))
        service["rewound"] = min(steps, service.get("rewound", steps))
    write_text(paths.tracking, json.dumps(services) + "\n")


def _whole(folder: Path, warn: Callable[[str], None]) -> bool:
    try:
        verify(folder)
    except WeightsError as error:
        warn(f"the checkpoint's weights will be exported again: {error}")
        return False
    return True
