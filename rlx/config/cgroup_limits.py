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


def _folders(controller: str) -> Iterator[Path]:
    """The folders of this process's groups that may limit a resource, and of all groups above them. Not all of them need exist."""
    if not GROUPS.exists():  # a kernel or sandbox without control groups limits nothing
        return
    for line in GROUPS.read_text(encoding="utf-8").splitlines():
        _, controllers, place = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        bases = {MOUNT} if not controllers else {MOUNT / controllers, MOUNT / controller}
        path = PurePosixPath(place.lstrip("/"))
        yield from (base / folder for base in bases for folder in (path, *path.parents))
