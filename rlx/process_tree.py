"""Find and kill processes that belong together, through `/proc` and signals: those of a run, or those of one environment worker.

A process belongs to them if its process group or session does, or if its environment carries their token. Both tests are needed:
a program that an environment starts may have a session of its own, and vLLM's engine overwrites its environment with its title.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable

TOKEN = "RLX_RUN_TOKEN"  # environment variable; its random value is the same in all processes of one attempt of a run
WORKER_TOKEN = "RLX_WORKER_TOKEN"  # the same for an environment worker and all that it starts


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; `None` if it is not alive. Pid and start time identify a process uniquely."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def state_of(pid: int) -> str:
    """The kernel's letter for the state of a process (`T`: stopped by a signal); empty if there is none."""
    return (_stat(pid) or [""])[0]


def find(groups: Iterable[int], token: str | None, variable: str = TOKEN) -> list[int]:
    """Pids of the living processes whose group or session is in `groups` or whose environment carries `token`. Excludes zombies.

    `variable`: the environment variable of the token.
    """
    wanted = {str(group) for group in groups}
    mark = f"{variable}={token}".encode()
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


def memory_below(pid: int) -> int:
    """Bytes of memory of the living descendants of a process, without the process itself; 0 if the kernel does not list children.

    Pages that several processes share count once in all (PSS), because a fork shares nearly all of its pages. It takes milliseconds for
    each GiB. Descendants whose parent has ended are not found.
    """
    total, left = 0, _children(pid)
    while left:
        each = left.pop()
        left += _children(each)
        for line in _lines(f"/proc/{each}/smaps_rollup"):
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def kill_all(groups: Iterable[int], token: str | None, timeout: float = 5.0, variable: str = TOKEN) -> list[int]:
    """SIGKILL the processes that `find` returns until it returns none twice in a row; return those still alive after `timeout` seconds."""
    groups = list(groups)
    deadline = time.monotonic() + timeout
    quiet = 0
    while quiet < 2:
        found = find(groups, token, variable)
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


def _children(pid: int) -> list[int]:
    """Pids of the processes that the threads of a process have started and that live."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:  # it has exited
        return []
    return [int(each) for thread in threads for line in _lines(f"/proc/{pid}/task/{thread}/children") for each in line.split()]


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().splitlines()
    except OSError:  # the process or thread has exited, or belongs to another user
        return []


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
