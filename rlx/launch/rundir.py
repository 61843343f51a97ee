"""The run directory: its name, who may write in it, and what is in it before anything starts.

Knows files and locks. A directory belongs to the processes that hold a shared lock on its `.lock`; making a run there takes the
lock exclusively for a moment, so two runs never meet in one directory. Knows nothing of processes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from rlx.config.errors import ConfigError
from rlx.config.schema import Config
from rlx.launch.plan import write_plan
from rlx.launch.provenance import write_provenance
from rlx.paths import RunPaths, write_text
from rlx.types import ProcessSpec
from rlx.waiting import wait_for

NOT_COMPARED = ("run", "dry_run", "clean")  # keys that do not change what a run computes


class RunLock:
    """A lock on a run directory, held as long as this object or a process that inherited its file descriptor lives."""

    def __init__(self, paths: RunPaths) -> None:
        self.fd = os.open(paths.lock, os.O_RDWR | os.O_CREAT, 0o644)

    def exclusive(self) -> bool:
        """Take it alone. False when somebody else holds it, and then this process holds nothing."""
        return self._try(fcntl.LOCK_EX)

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
        deadline = time.monotonic() + timeout
        while not (alone := self.exclusive()) and time.monotonic() < deadline:
            time.sleep(0.05)
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


def default_name(cfg: Config, choices: Mapping[str, str]) -> str:
    """`<env>-<model>-<loss>-<short id>`."""
    parts = [
        "+".join(cfg.envs),
        choices.get("model", cfg.model.name),
        choices.get("loss", str(cfg.loss.get("_target_", "loss")).rpartition(".")[2]),
    ]
    return "-".join(re.sub(r"[^\w.+]+", "_", part) for part in [*parts, secrets.token_hex(3)])


def choose(cfg: Config, choices: Mapping[str, str]) -> tuple[str, Path]:
    """Name and directory of a run, from `run.name` and `run.dir` or their defaults."""
    if cfg.run.dir:
        directory = Path(cfg.run.dir).expanduser().absolute()
        return cfg.run.name or directory.name, directory
    name = cfg.run.name or default_name(cfg, choices)
    if "/" in name or name in (".", ".."):
        raise ConfigError(
            f"run.name={name} is not the name of one folder.\n  fix: name the folder only, or give the whole path as run.dir="
        )
    return name, Path("outputs").absolute() / name


def create(
    cfg: Config, text: str, overrides: Sequence[str], plan: Sequence[ProcessSpec], name: str, directory: Path
) -> tuple[RunPaths, RunLock]:
    """Make the run directory and write what a run has before it starts; the lock is held shared.

    `text` is the resolved configuration as YAML; `run.name` and `run.dir` are filled in.
    Raises ConfigError when the directory is taken, in use, or cannot be written.
    """
    paths = RunPaths(directory)
    with writing(directory):
        lock = _claim(paths, clean=cfg.clean)
        _fill(paths, cfg, text, overrides, plan, name)
    lock.share()
    return paths, lock


def join(
    cfg: Config, text: str, overrides: Sequence[str], plan: Sequence[ProcessSpec], name: str, directory: Path
) -> tuple[RunPaths, RunLock]:
    """Enter the run directory of other roles of the same run, or make it if it is not there; the lock is held shared.

    Raises ConfigError when it holds a run of another configuration.
    """
    paths = RunPaths(directory)
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        lock = RunLock(paths)
        # Of several roles that start at once, one makes the directory and the others wait for it.

        def ready() -> bool:
            if not paths.config.exists() and lock.exclusive() and not paths.config.exists():
                _refuse_strangers(paths)
                _fill(paths, cfg, text, overrides, plan, name)
            return paths.config.exists()

        wait_for(ready, f"another role to write {paths.config}", timeout=10, poll=0.02)
        lock.share()
    here, there = yaml.safe_load(text), yaml.safe_load(paths.config.read_text())
    differences = [line for line in _differences(there, here) if line.split(".")[0].split(":")[0] not in NOT_COMPARED]
    if differences:
        shown = "".join(f"\n  {line}" for line in differences[:8]) + ("\n  …" if len(differences) > 8 else "")
        raise ConfigError(
            f"run.dir={directory} holds a run with another configuration (there ≠ here):{shown}\n  fix: give the same overrides, or another run.dir="
        )
    return paths, lock


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Turn what the operating system says about an unusable directory into a ConfigError."""
    try:
        yield
    except OSError as error:
        if error.errno not in (
            errno.EACCES,
            errno.EPERM,
            errno.EROFS,
            errno.ENOSPC,
            errno.EDQUOT,
            errno.ENOTDIR,
            errno.EEXIST,
            errno.ENAMETOOLONG,
        ):
            raise
        raise ConfigError(
            f"the run directory {directory} cannot be written: {error.strerror}: {error.filename}\n  fix: give another run.dir="
        ) from error


def looks_like_run(paths: RunPaths) -> bool:
    """Whether a directory was made by this program: only such a one is ever deleted."""
    return paths.lock.is_file() and (paths.status.is_file() or (paths.config.is_file() and paths.plan.is_file()))


def _claim(paths: RunPaths, *, clean: bool) -> RunLock:
    """Make the directory, or empty it when it is an old run's and `clean`; the lock is held exclusively."""
    root = paths.root
    root.mkdir(parents=True, exist_ok=True)
    if any(entry != paths.lock for entry in root.iterdir()):
        if not clean:
            what = "holds a run already" if looks_like_run(paths) else "is not empty"
            fix = "clean=true deletes it first" if looks_like_run(paths) else "give another one"
            raise ConfigError(f"the run directory {root} {what}.\n  fix: give another run.name= or run.dir=; {fix}")
        _refuse_strangers(paths)
    lock = RunLock(paths)
    if not lock.exclusive():
        lock.close()
        raise ConfigError(f"a run is alive in {root}.\n  fix: stop it, or give another run.name= or run.dir=")
    for entry in root.iterdir():
        if entry == paths.lock:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    return lock


def _refuse_strangers(paths: RunPaths) -> None:
    root = paths.root
    strangers = [entry.name for entry in root.iterdir() if entry != paths.lock]
    if strangers and not looks_like_run(paths):
        raise ConfigError(
            f"the directory {root} is not a run's (it holds {', '.join(sorted(strangers)[:3])}{', …' if len(strangers) > 3 else ''}), "
            "so nothing in it is touched, with clean=true neither.\n  fix: give another run.name= or run.dir="
        )


def _fill(paths: RunPaths, cfg: Config, text: str, overrides: Sequence[str], plan: Sequence[ProcessSpec], name: str) -> None:
    config: dict[str, Any] = yaml.safe_load(text)
    config["run"] = {**config["run"], "name": name, "dir": str(paths.root)}
    write_text(paths.overrides, yaml.safe_dump(list(overrides), allow_unicode=True))
    write_plan(paths.plan, plan)
    write_provenance(paths, cfg)
    if cfg.model.warm_start is None:
        # A folder is named absolutely: the roles need not share the launcher's working directory.
        local = Path(cfg.model.name).expanduser()
        write_text(paths.initial_model, f"{local.absolute() if local.is_dir() else cfg.model.name}\n")
    write_text(paths.config, yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=140))  # last: who joins waits for it


def _differences(there: Any, here: Any, key: str = "") -> Iterator[str]:
    if isinstance(there, dict) and isinstance(here, dict):
        for name in dict.fromkeys([*there, *here]):
            yield from _differences(there.get(name), here.get(name), f"{key}.{name}" if key else name)
    elif there != here:
        yield f"{key}: {there} ≠ {here}"
