"""The run directory: its name, who may write in it, and what is in it before anything starts.

Knows files and locks. A directory belongs to the processes that hold a shared lock on its `.lock`; making a run there takes the
lock exclusively for a moment, so two runs never meet in one directory. Knows nothing of processes.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from rlx.checkpoints.folders import NoCheckpoint, Start, adopt, write_start
from rlx.config.errors import ConfigError
from rlx.config.load import load_run, to_yaml
from rlx.config.schema import Config, RunConfig
from rlx.config.secret import hidden, hide_lines, secrets_of
from rlx.config.tree import secret_keys
from rlx.paths import RunPaths, write_text
from rlx.plan.record import write_plan
from rlx.process import full_disk
from rlx.runs.jobs import is_alive, job_of
from rlx.runs.provenance import write_provenance
from rlx.runs.replay import check_replay
from rlx.runs.rewind import LATEST, check_room, find_fork, is_fork, rewind, say, source_of
from rlx.types import ProcessSpec
from rlx.waiting import wait_for

MAKING = ".making"  # is in a run directory while it is made: one that was left half made is nobody's
NOT_COMPARED = ("run", "dry_run", "clean", "resume")  # keys that do not change what a run computes
# Keys that may change when a run goes on in its own directory: how long, where and how watched, not what is learnt.
MAY_CHANGE = (*NOT_COMPARED, "max_steps", "ckpt", "launcher", "slurm", "logger", "hardware", "inference", "weight_broadcast")


class RunLock:
    """A lock on a run directory, held as long as this object or a process that inherited its file descriptor lives."""

    def __init__(self, paths: RunPaths | Path) -> None:
        """`paths`: of the run, or a lock file of another name."""
        self.fd = os.open(paths if isinstance(paths, Path) else paths.lock, os.O_RDWR | os.O_CREAT, 0o644)

    def exclusive(self) -> bool:
        """Take it alone. False when somebody else holds it, and then this process holds nothing."""
        return self._try(fcntl.LOCK_EX)

    def take(self, timeout: float) -> bool:
        """Take it alone, waiting at most `timeout` seconds for those who hold it."""
        deadline = time.monotonic() + timeout
        while not (alone := self.exclusive()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return alone

    def share(self, timeout: float = 5.0) -> bool:
        """Take it beside others; wait at most `timeout` seconds for one who is making the directory."""
        deadline = time.monotonic() + timeout
        while not self._try(fcntl.LOCK_SH):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def wait_until_alone(self, timeout: float) -> bool:
        """Wait until nobody else holds it, at most `timeout` seconds; it is held shared again afterwards."""
        alone = self.take(timeout)
        self.share()
        return alone

    def close(self) -> None:
        os.close(self.fd)

    def _try(self, mode: int) -> bool:
        try:
            fcntl.flock(self.fd, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def settle(cfg: Config, label: str) -> Config:
    """The configuration with `run.name` and an absolute `run.dir` filled in.

    By default `outputs/<label>-<short id>`; of a dry run `outputs/dry_run-<label>`, which the next one takes the place of.
    """
    directory = Path(cfg.run.dir).expanduser().absolute() if cfg.run.dir else None
    label = re.sub(r"[^\w.+-]+", "_", label)
    default = f"dry_run-{label}" if cfg.dry_run else f"{label}-{secrets.token_hex(3)}"
    name = cfg.run.name or (directory.name if directory else default)
    if Path(name).name != name:
        raise ConfigError(
            f"run.name={name} is not the name of one folder.\n  fix: name the folder only, or give the whole path as run.dir="
        )
    return replace(cfg, run=RunConfig(name=name, dir=str(directory or Path("outputs").absolute() / name)))


def create(cfg: Config, overrides: Sequence[str], plan: Sequence[ProcessSpec], *, even_done: bool = False) -> tuple[RunPaths, RunLock]:
    """Make the run directory of a settled configuration, with what a run has before it starts; the lock is held shared.

    With `replay`, it begins with the model of that run. With `resume=latest` or a step, the directory is that of the run that goes on;
    with a path, the new run starts from that checkpoint. `even_done` takes a run on whose last step is in its checkpoint: it ends at once.
    Raises ConfigError when the directory is taken, in use, or cannot be written, and when there is nothing to resume or to replay.
    """
    paths = _paths(cfg)
    if cfg.replay is not None:
        cfg = replace(cfg, replay=str(Path(cfg.replay).expanduser().absolute()))
        if Path(str(cfg.replay)).resolve() == paths.root.resolve():
            raise ConfigError(
                f"replay={cfg.replay} is the directory of this run, too.\n  fix: give the replay a run.name= or run.dir= of its own"
            )
    with writing(paths.root):
        if cfg.resume is not None and not is_fork(cfg.resume) and (cfg.resume != LATEST or (paths.root.exists() and not _is_free(paths))):
            return paths, _go_on(paths, cfg, overrides, plan, even_done)
        start = None
        if cfg.resume == LATEST:
            cfg = replace(cfg, resume=None)  # nothing is there yet
        if is_fork(cfg.resume):
            start = find_fork(str(cfg.resume))
            check_room(start, cfg.max_steps)
            cfg = replace(cfg, resume=str(start.checkpoint))
        replayed = check_replay(cfg, start.step if start else 0) if cfg.replay is not None else None
        lock = _claim(paths, clean=cfg.clean)
        try:
            if source := source_of(start) if start else replayed:
                write_text(paths.initial_model, source.initial_model.read_text())
            write_start(paths, _adopt(paths, start) if start else None)
            _fill(paths, cfg, overrides, plan)
            (paths.root / MAKING).unlink()
        except BaseException:
            lock.close()
            raise
    lock.share()
    return paths, lock


def _adopt(paths: RunPaths, start: Start) -> Start:
    try:
        return adopt(paths, start)
    except NoCheckpoint as error:
        raise ConfigError(f"resume={start.checkpoint}: {error}.\n  fix: name another checkpoint") from error


def _go_on(paths: RunPaths, cfg: Config, overrides: Sequence[str], plan: Sequence[ProcessSpec], even_done: bool) -> RunLock:
    """Take the directory of a run that ended, back at the checkpoint that `cfg.resume` names; the lock is held shared."""
    assert cfg.resume is not None
    if not paths.config.is_file() or not looks_like_run(paths):
        raise ConfigError(f"resume={cfg.resume}: {paths.root} holds no run.\n  fix: name the run with run.name= or run.dir=")
    lock = _alone(paths)
    try:
        _rewind_for(paths, cfg, overrides, plan, even_done)
    except BaseException:
        lock.close()
        raise
    lock.share()
    return lock


def _rewind_for(paths: RunPaths, cfg: Config, overrides: Sequence[str], plan: Sequence[ProcessSpec], even_done: bool) -> None:
    """Bring the directory to where the attempt starts. Raises ConfigError, before anything is changed, when that cannot be."""
    assert cfg.resume is not None
    before = load_run(paths.root, secrets=False)
    differences = [d for d in _differences(asdict(before), asdict(cfg)) if re.split("[.:]", d)[0] not in MAY_CHANGE]
    if differences:
        shown = "".join(f"\n  {line}" for line in differences[:8]) + ("\n  …" if len(differences) > 8 else "")
        raise ConfigError(
            f"the run in {paths.root} has another configuration (there ≠ here):{shown}\n"
            f"  fix: go on with its own, --config-dir {paths.root} --config-name config resume={cfg.resume}; "
            f"or start another run from its checkpoint, resume={paths.root} run.name=NEW"
        )
    start = rewind(paths, cfg.resume, max_steps=None if even_done else cfg.max_steps)
    say(f"{paths.root}: going on after {start.step} steps" if start else f"{paths.root} has no checkpoint: starting from step 0")
    write_provenance(paths, cfg, again=True)
    _keep_secrets(paths, cfg)
    _describe(paths, replace(cfg, resume=before.resume), overrides, plan)


def join(cfg: Config, overrides: Sequence[str], plan: Sequence[ProcessSpec]) -> tuple[RunPaths, RunLock]:
    """Enter the run directory of other roles of the same run, or make it if it is not there; the lock is held shared.

    Raises ConfigError when it holds a run of another configuration.
    """
    paths = _paths(cfg)
    if cfg.resume is not None:
        raise ConfigError(f"resume={cfg.resume} is for `rlx train`, which prepares the directory for all roles.\n  fix: use that")
    with writing(paths.root):
        paths.root.mkdir(parents=True, exist_ok=True)
        if paths.status.exists():
            raise ConfigError(f"{paths.root} belongs to `rlx train`; a role of its own cannot join it.\n  fix: give another run.dir=")
        if not paths.lock.exists():
            _refuse_taken(paths, clean=False)
        lock = RunLock(paths)

        # Of several roles that start at once, one makes the directory and the others wait for it.
        def ready() -> bool:
            if not paths.config.exists() and lock.exclusive() and not paths.config.exists():
                _fill(paths, cfg, overrides, plan)
            return paths.config.exists()

        wait_for(ready, f"another role to write {paths.config}", timeout=10, poll=0.02)
        lock.share()
    here, there = asdict(cfg), asdict(load_run(paths.root))
    differences = [line for line in _differences(there, here) if re.split("[.:]", line)[0] not in NOT_COMPARED]
    if differences:
        shown = "".join(f"\n  {line}" for line in differences[:8]) + ("\n  …" if len(differences) > 8 else "")
        raise ConfigError(
            f"run.dir={paths.root} holds a run with another configuration (there ≠ here):{shown}\n"
            "  fix: give the same overrides, or another run.dir="
        )
    return paths, lock


def describe(
    cfg: Config, overrides: Sequence[str], plan: Sequence[ProcessSpec], sbatch: str | None = None, explained: str | None = None
) -> RunPaths | None:
    """What a dry run leaves: configuration, overrides, plan, what the plan means in words, the script for SLURM. A run may follow there.

    None where there is a run already: nothing of it is touched. Raises ConfigError when the directory cannot be written.
    """
    paths = _paths(cfg)
    with writing(paths.root):
        if paths.root.exists() and not _is_free(paths):
            return None
        _describe(paths, cfg, overrides, plan)
        for path, text in ((paths.sbatch, sbatch), (paths.explained, explained)):
            if text is not None:
                write_text(path, f"{text.rstrip()}\n")
    return paths


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Turn what the operating system says about an unusable directory into a ConfigError."""
    try:
        yield
    except OSError as error:
        if line := full_disk(error, directory):
            raise ConfigError(line) from error
        what = f"{error.strerror}: {error.filename}" if error.strerror else str(error)
        raise ConfigError(f"the run directory {directory} cannot be written: {what}\n  fix: give another run.dir=") from error


def new_attempt(paths: RunPaths) -> int:
    """Create the next folder of log files, point `logs/latest` to it, and return its number."""
    number = 0
    while paths.logs(number).exists():
        number += 1
    paths.logs(number).mkdir(parents=True)
    link = paths.latest_logs.with_name(".latest")
    link.unlink(missing_ok=True)
    link.symlink_to(paths.logs(number).name)
    os.replace(link, paths.latest_logs)
    return number


def differences(paths: RunPaths, cfg: Config) -> list[str]:
    """The keys in which a run's configuration is another than `cfg`, but for those that do not change what it computes."""
    there, here = asdict(load_run(paths.root, secrets=False)), asdict(hidden(cfg))
    return [line for line in _differences(there, here) if re.split("[.:]", line)[0] not in (*NOT_COMPARED, "launcher", "slurm")]


def looks_like_run(paths: RunPaths) -> bool:
    """Whether a directory was made by this program: only such a one is ever deleted."""
    whole = not (paths.root / MAKING).exists()
    return whole and paths.lock.is_file() and (paths.status.is_file() or (paths.config.is_file() and paths.plan.is_file()))


def _is_free(paths: RunPaths) -> bool:
    """Whether a directory is empty, was left half made, or holds a dry run's files only."""
    if (paths.root / MAKING).exists():
        return True
    entries = {entry.name for entry in paths.root.iterdir()} - {paths.lock.name}
    described = {paths.config.name, paths.overrides.name, paths.plan.name}
    return entries - {paths.sbatch.name, paths.explained.name} in (set(), described)


def _claim(paths: RunPaths, *, clean: bool) -> RunLock:
    """Make the directory, or empty it when it is an old run's and `clean`; the lock is held exclusively."""
    root = paths.root
    root.mkdir(parents=True, exist_ok=True)
    _refuse_taken(paths, clean=clean)
    lock = _alone(paths)
    _refuse_taken(paths, clean=clean)  # now that nobody else can change it
    (root / MAKING).touch()
    for entry in root.iterdir():
        if entry in (paths.lock, root / MAKING):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    return lock


def _refuse_waiting(paths: RunPaths) -> None:
    """Raise ConfigError where a SLURM job is to run in the directory: while it waits, nobody holds the lock."""
    job = job_of(paths)
    try:
        waits = job is not None and is_alive(job)
    except RuntimeError as error:
        raise ConfigError(
            f"{paths.root} was given to SLURM job {job}, and whether that lives cannot be found out: {error}.\n"
            "  fix: ask again where SLURM answers, or give another run.name= or run.dir="
        ) from error
    if waits:
        raise ConfigError(f"{paths.root} belongs to SLURM job {job}, which waits or runs.\n  fix: scancel {job}, or give another run.name=")


def _alone(paths: RunPaths) -> RunLock:
    """The lock of a directory, held exclusively. Raises ConfigError when somebody else has it."""
    lock = RunLock(paths)
    if not lock.exclusive():
        lock.close()
        raise ConfigError(f"a run is alive in {paths.root}.\n  fix: stop it, or give another run.name= or run.dir=")
    try:
        _refuse_waiting(paths)
    except ConfigError:
        lock.close()
        raise
    return lock


def _refuse_taken(paths: RunPaths, *, clean: bool) -> None:
    if _is_free(paths):
        return
    if not looks_like_run(paths):
        names = sorted(entry.name for entry in paths.root.iterdir())
        raise ConfigError(
            f"{paths.root} holds something else than a run ({', '.join(names[:3])}{', …' if len(names) > 3 else ''}); "
            "clean=true does not delete that either.\n  fix: give another run.name= or run.dir="
        )
    if not clean:
        raise ConfigError(
            f"{paths.root} holds a run already.\n"
            "  fix: give another run.name= or run.dir=; or resume=latest, which goes on; or clean=true, which deletes it"
        )


def _fill(paths: RunPaths, cfg: Config, overrides: Sequence[str], plan: Sequence[ProcessSpec]) -> None:
    write_provenance(paths, cfg)
    _keep_secrets(paths, cfg)
    if cfg.model.warm_start is None and not paths.initial_model.exists():
        # A folder is named absolutely: the roles need not share the launcher's working directory.
        local = Path(cfg.model.name).expanduser()
        write_text(paths.initial_model, f"{local.absolute() if local.is_dir() else cfg.model.name}\n")
    _describe(paths, cfg, overrides, plan)


def _keep_secrets(paths: RunPaths, cfg: Config) -> None:
    """For the roles, which find them with `load_run`."""
    if kept := secrets_of(cfg):
        write_text(paths.secrets, yaml.safe_dump(kept), 0o600)
    else:
        paths.secrets.unlink(missing_ok=True)


def _describe(paths: RunPaths, cfg: Config, overrides: Sequence[str], plan: Sequence[ProcessSpec]) -> None:
    write_text(paths.overrides, yaml.safe_dump(hide_lines(overrides, cfg), allow_unicode=True))
    write_plan(paths.plan, plan)
    write_text(paths.config, to_yaml(replace(cfg, dry_run=False, clean=False)))  # last: who joins waits for it


def _paths(cfg: Config) -> RunPaths:
    assert cfg.run.dir is not None, "the configuration is not settled"
    return RunPaths(Path(cfg.run.dir))


def _differences(there: Any, here: Any, key: str = "") -> Iterator[str]:
    if isinstance(there, dict) and isinstance(here, dict):
        for name in dict.fromkeys([*there, *here]):
            yield from _differences(there.get(name), here.get(name), f"{key}.{name}" if key else name)
    elif there != here:
        yield f"{key}: another one (secret)" if key in secret_keys(Config) else f"{key}: {there} ≠ {here}"
