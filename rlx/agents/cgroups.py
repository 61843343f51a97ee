"""Bounds of a box for all its processes together, where this machine lets us make control groups; rlimits stand in elsewhere.

Both versions work: version 1, which has a tree for each controller, and version 2 where the tree of this process is delegated.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rlx.config.schema_rollout import BoxConfig as Limits

ROOT = Path("/sys/fs/cgroup")
PERIOD = 100_000  # microseconds over which CPU time is counted
NAME = "rlx-{pid}-{number}"


@functools.cache
def trees(root: Path = ROOT) -> dict[str, Path]:
    """The folder below which this process may make groups, by controller: `pids`, `memory`, `cpu`."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        names = ("pids", "memory", "cpu") if number == "0" and not controllers else controllers.split(",")
        for name in {"pids", "memory", "cpu"}.intersection(names):
            for folder in (root / path.lstrip("/"), root / name / path.lstrip("/"), root / name):
                offered = (folder / "cgroup.subtree_control").read_text().split() if (folder / "cgroup.subtree_control").exists() else None
                right = folder.is_relative_to(root / name) if offered is None else name in offered
                if right and os.access(folder, os.W_OK) and (folder / "cgroup.procs").exists():
                    found.setdefault(name, folder)
    return found


@dataclass(slots=True)
class Group:
    """The control groups of one box."""

    folders: list[Path] = field(default_factory=list)
    bounds: set[str] = field(default_factory=set)  # what they bound: `pids`, `memory`, `cpu`

    @classmethod
    def make(cls, number: int, limits: Limits) -> Group:
        """Groups with these bounds, as far as this machine lets us make them."""
        group, name = cls(), NAME.format(pid=os.getpid(), number=number)
        for controller, folder in trees().items():
            with contextlib.suppress(OSError):
                own = folder / name
                own.mkdir(exist_ok=True)
                if own not in group.folders:
                    group.folders.append(own)
                for file, value in _settings(controller, limits):
                    if (own / file).exists():
                        (own / file).write_text(value)
                        group.bounds.add(controller)
        return group

    def enter(self) -> str:
        """Shell commands with which a process enters the groups."""
        return "".join(f"echo 0 > {folder}/cgroup.procs; " for folder in self.folders)

    def processes(self) -> set[int]:
        """The processes in the groups."""
        found: set[int] = set()
        for folder in self.folders:
            with contextlib.suppress(OSError):
                found.update(map(int, (folder / "cgroup.procs").read_text().split()))
        return found

    def remove(self) -> None:
        """Remove the groups, whose processes have ended."""
        for folder in self.folders:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _settings(controller: str, limits: Limits) -> Iterator[tuple[str, str]]:
    if controller == "pids" and limits.processes:
        yield "pids.max", str(limits.processes)
    elif controller == "memory" and limits.memory_gb:
        size = str(int(limits.memory_gb * 2**30))
        yield from (("memory.max", size), ("memory.swap.max", "0"), ("memory.limit_in_bytes", size))
    elif controller == "cpu" and limits.cpus:
        quota = int(limits.cpus * PERIOD)
        yield from (("cpu.max", f"{quota} {PERIOD}"), ("cpu.cfs_period_us", str(PERIOD)), ("cpu.cfs_quota_us", str(quota)))


def sweep() -> None:
    """Remove the groups of processes that are gone: a worker that was killed leaves them, empty."""
    for folder in set(trees().values()):
        for own in folder.glob("rlx-*"):
            pid = own.name.split("-")[1]
            if not Path(f"/proc/{pid}").exists():
                with contextlib.suppress(OSError):
                    own.rmdir()
