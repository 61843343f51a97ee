"""Find and kill every process of a run, through `/proc` and signals.

A process belongs to a run if the supervisor started its process group or session, or if its environment carries the run's token.
Both tests are needed: torchrun gives its workers their own sessions, and vLLM's engine overwrites its environment with its title.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

TOKEN = "RLX_RUN_TOKEN"  # environment variable; its random value is the same in all processes of one attempt
BOUND = str(Path(__file__).with_name("bound.py"))


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; `None` if it is not alive. Pid and start time identify a process uniquely."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def find(groups: Iterable[int], token: str | None) -> list[int]:
    """Pids of the living processes whose group or session is in `groups` or whose environment carries `token`. Excludes zombies."""
    wanted = {str(group) for group in groups}
    mark = f"{TOKEN}={token}".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or (pid := int(name)) == os.getpid():
            continue
        fields = _stat(pid)
        if fields is None or fields[0] in "ZX":
            continue
        if fields[2] in wanted or fields[3] in wanted or (token is not None and mark in _environment(pid)):
            found.append(pid)
    return found


def kill_all(groups: Iterable[int], token: str | None, timeout: float = 5.0) -> list[int]:
    """SIGKILL the processes that `find` returns until it returns none twice in a row; return those still alive after `timeout` seconds."""
    groups = list(groups)
    deadline = time.monotonic() + timeout
    quiet = 0
    while quiet < 2:
        found = find(groups, token)
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if found and time.monotonic() > deadline:
            return found
        quiet = 0 if found else quiet + 1
        time.sleep(0.02)
    return []


def bound(argv: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The command line of a process that becomes `argv` and that the kernel kills with the thread that starts it, or with this process.

    Not a `preexec_fn`: with one, the child runs Python and all fork handlers of the loaded libraries before `exec`, among them those of
    gRPC and OpenBLAS. In a process with threads they may deadlock or crash. `environment`: the child's; its PATH is searched.
    Raises OSError if there is no such command.
    """
    if shutil.which(argv[0], path=environment.get("PATH", os.defpath)) is None:
        number = errno.EACCES if os.path.exists(argv[0]) else errno.ENOENT
        raise OSError(number, os.strerror(number), argv[0])
    return [sys.executable, "-I", "-S", BOUND, str(os.getpid()), *argv]


def _stat(pid: int) -> list[str] | None:
    """The fields of `/proc/PID/stat` from the third on: state, parent, group, session, …"""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _environment(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # it has exited, or belongs to another user
        return []
