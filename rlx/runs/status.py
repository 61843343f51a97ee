"""`status.json`: the current state of a run, for people and scripts. Also describes a process's return code as text."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import msgspec

from rlx.paths import RunPaths, listed, write_text
from rlx.polling import LEFT
from rlx.process import FULL

FINAL = ("completed", "failed", "interrupted", "preempted")
"""Final states of an attempt. A preempted run starts again when SLURM restarts its job."""

EXIT_CODES = {"completed": 0, "failed": 1, "interrupted": 130, "preempted": LEFT}
"""Exit code by final state. Exit code 2 means an invalid configuration; then there is no run."""

STALE_HANDLE = 10.0  # seconds in which a network file system finds the file that replaced an open one

TRACEBACK = "Traceback (most recent call last):"
CHAINED = (  # Python's sentences between two tracebacks
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a run failed: the first process that failed, and its last log lines."""

    role: str  # a role of the plan, or "supervisor" or "launcher"
    replica: int
    returncode: int | None  # negative: the signal that killed it; None: its exit was not seen
    reason: str  # the reason as text
    log: str  # path of its log file, relative to the run directory
    last_lines: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """In one line, with the last of the log: `trainer: exit code 1: ValueError: no data`."""
        return ": ".join([self.role, self.reason.partition("\n")[0], *self.last_lines[-1:]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A process that died and was started again."""

    name: str  # from the plan: "inference_0"
    reason: str  # how it died, as text
    log: str  # path of the log file of the process that died, relative to the run directory
    time: float  # seconds since the epoch


@dataclass(kw_only=True)
class Status:
    """The contents of `status.json`. `started` and `updated` are seconds since the epoch."""

    state: str = "starting"  # starting | running | completed | failed | interrupted | preempted
    step: int = 0  # completed training steps
    max_steps: int = 0
    attempt: int = 0
    exit_code: int | None = None
    cause: Cause | None = None
    processes: list[dict[str, Any]] = field(default_factory=list)  # role, replica, host, pid
    restarts: list[Restart] = field(default_factory=list)  # of this attempt, the oldest first
    supervisor: dict[str, Any] | None = None  # host, pid
    job: str | None = None  # id of the SLURM job that runs it
    launcher: dict[str, Any] | None = None  # host, pid
    started: float = field(default_factory=time.time)
    updated: float = 0.0

    def finish(self, state: str, cause: Cause | None = None) -> None:
        """Enter a final state and set its exit code."""
        self.state, self.exit_code, self.cause = state, EXIT_CODES[state], cause

    def fail(self, paths: RunPaths, role: str, reason: str, log: Path, num_lines: int = 0) -> None:
        """Write that the run failed beside its processes. `num_lines`: at the end of `log`, to show."""
        where, lines = os.path.relpath(log, paths.root), last_lines(log, num_lines)
        self.finish("failed", Cause(role=role, replica=0, returncode=None, reason=reason, log=where, last_lines=lines))
        self.write(paths)

    def give_up(self, paths: RunPaths, reason: str) -> None:
        """Write that the run failed before its processes started, and why; print it."""
        self.fail(paths, "launcher", reason, paths.log(self.attempt, "launcher"))
        print(reason, file=sys.stderr, flush=True)

    def write(self, paths: RunPaths) -> None:
        """Replace the file atomically. On a full disk a final state overwrites the old file in place; any other state raises OSError."""
        self.updated = time.time()
        text = json.dumps(asdict(self), indent=1) + "\n"
        try:
            write_text(paths.status, text)
        except OSError as error:
            if error.errno not in FULL or self.state not in FINAL:
                raise
            short = asdict(self) | {"cause": asdict(replace(self.cause, last_lines=())) if self.cause else None}
            if not (_write_over(paths.status, text) or _write_over(paths.status, json.dumps(short) + "\n")):
                raise


def _write_over(path: Path, text: str) -> bool:
    """Overwrite a file within its allocated space and return whether that worked. If not, restore the old content."""
    try:
        old, new = path.read_bytes(), text.encode()
        new += b" " * (len(old) - len(new))
        with path.open("r+b", buffering=0) as file:
            if file.write(new) == len(new):
                return True
            file.seek(0)
            file.write(old)
            file.truncate(len(old))
    except OSError:
        pass
    return False


def read_status(paths: RunPaths) -> Status | None:
    """The status of a run; `None` if the directory has none. Raises ValueError for a file that rlx has not written."""
    try:
        record = msgspec.json.decode(_read(paths.status), type=dict[str, Any])
    except FileNotFoundError:
        return None
    if unknown := record.keys() - {each.name for each in fields(Status)}:
        raise ValueError(f"it has {', '.join(sorted(unknown))}")
    return msgspec.convert(record, Status)


def _read(file: Path) -> str:
    """The text of a file that other hosts replace meanwhile: NFS answers ESTALE until this host looks up the new one."""
    deadline = time.monotonic() + STALE_HANDLE
    while True:
        try:
            return file.read_text(encoding="utf-8")
        except OSError as error:
            if error.errno != errno.ESTALE or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def describe_returncode(returncode: int, service: bool = False) -> str:
    """How a process ended, as text, with the usual cause of common signals."""
    if returncode == 0 and service:
        return "exited early with exit code 0; it must serve until the run ends"
    if returncode >= 0:
        return f"exit code {returncode}"
    hint = " (by a user, or because memory ran out: see `dmesg`)" if returncode == -signal.SIGKILL else ""
    name = next((each.name for each in signal.Signals if each == -returncode), f"signal {-returncode}")
    return f"killed by {name}{hint}"


def last_lines(log: Path, count: int) -> tuple[str, ...]:
    """The last non-empty lines of a log file, at most `count`. Of a line that a progress bar redraws, only its last state."""
    if not log.is_file():  # none yet, or a stranger's pipe
        return ()
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 65536))
        text = file.read(65536).decode(errors="replace")
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return tuple(_from_the_engine([line for line in lines if line])[-count:]) if count > 0 else ()


def _from_the_engine(lines: list[str]) -> list[str]:
    """If vLLM's engine failed in a process of its own, the process that waited for it prints forty more lines. Leave them out.

    The last of them says that the cause stands above. It is kept if the engine's last line names no error, or if it has an exit code.
    """
    if not any("See root cause above" in line for line in lines[-3:]) or TRACEBACK not in lines:
        return lines
    said = lines
    while said and (said is lines or said[-1] in CHAINED) and TRACEBACK in said:
        said = said[: len(said) - 1 - said[::-1].index(TRACEBACK)]  # lines of the engine begin with its name, so its own are not found
    said = [line for line in said if "[shutdown] Process manager: send sigterm" not in line]
    summary = [line for line in lines[-3:] if "See root cause above" in line]
    known = bool(said) and re.search(r"error|exception", said[-1], flags=re.IGNORECASE) and not re.search(r": -\d+", summary[0])
    return said if known else said + summary


def new_attempt(paths: RunPaths) -> int:
    """Create the next folder of log files, point `logs/latest` to it, and return its number."""
    number = 0
    while listed(paths.logs(number)):
        number += 1
    paths.logs(number).mkdir(parents=True)
    link = paths.latest_logs.with_name(".latest")
    link.unlink(missing_ok=True)
    link.symlink_to(paths.logs(number).name)
    os.replace(link, paths.latest_logs)
    return number
