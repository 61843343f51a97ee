"""What the control groups of this process (a container's, a pod's, a job's) allow it: memory and processors. Versions 1 and 2 of Linux.

A group's limits hold for all groups below it, so the smallest on the way up counts. Inside a container the file system shows only its own
group, as the root, while the path that the kernel names may be the host's.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

GROUPS = Path("/proc/self/cgroup")  # a line for each hierarchy: `0::/path` in version 2, `4:cpu,cpuacct:/path` in version 1
MOUNT = Path("/sys/fs/cgroup")
MACHINE = Path("/proc/meminfo")


def cores() -> int:
    """Processors that this process may keep busy: those it may run on, and no more than the quota of processor time, at least 1."""
    have = float(len(os.sched_getaffinity(0)))
    for folder in _folders("cpu"):
        with contextlib.suppress(OSError, ValueError):  # `max 100000` has no quota
            quota, period = (folder / "cpu.max").read_text().split()
            have = min(have, int(quota) / int(period))
        with contextlib.suppress(OSError, ValueError):
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            have = min(have, int(quota) / int(period)) if int(quota) > 0 else have  # −1 has no quota
    return max(1, int(have))


def memory() -> int | None:
    """Bytes that the processes of this group may use together; `None` if there is no limit."""
    found = []
    for folder in _folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # `max` has no limit
                found.append(int((folder / name).read_text()))
    return min(found, default=None)


def free_memory() -> int:
    """Bytes that the processes of this group may still take: what the machine has available, and what each limit leaves.

    Pages of files count as free, because the kernel gives them up.
    """
    machine = dict(line.split(":", 1) for line in MACHINE.read_text().splitlines())
    found = [int(machine["MemAvailable"].split()[0]) * 1024]
    for folder in _folders("memory"):
        for most, now in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with contextlib.suppress(OSError, ValueError):  # `max` has no limit
                limit, used = (int((folder / name).read_text()) for name in (most, now))
                found.append(limit - used + _of_files(folder))
    return max(0, min(found))


def _of_files(folder: Path) -> int:
    """Bytes of files that a group holds in memory; of version 1 the sums over its groups."""
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return 0
    return sum(int(stat.get(f"total_{name}", stat.get(name, 0))) for name in ("inactive_file", "active_file"))


def _folders(controller: str) -> Iterator[Path]:
    """The folders of this process's groups that may limit a resource, and of all groups above them. Not all of them need exist."""
    if not GROUPS.exists():  # a kernel or sandbox without control groups limits nothing
        return
    for line in GROUPS.read_text().splitlines():
        _, controllers, place = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        bases = {MOUNT} if not controllers else {MOUNT / controllers, MOUNT / controller}
        path = PurePosixPath(place.lstrip("/"))
        yield from (base / folder for base in bases for folder in (path, *path.parents))
