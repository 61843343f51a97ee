"""Bounds of a box for all its processes together, where this machine lets us make control groups; rlimits stand in elsewhere.

Both versions work: version 1, which has a tree for each controller, and version 2 where the tree of this process is delegated.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlx.config.schema_rollout import BoxConfig

ROOT = Path("/sys/fs/cgroup")
PERIOD = 100_000  # microseconds over which CPU time is counted


@functools.cache
def trees(root: Path = ROOT) -> dict[str, Path]:
    """The folder below which this process may make groups, by controller: `pids`, `memory`, `cpu`."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        number, controllers, path = line.split(":", 2)
        names = ("pids", "memory", "cpu") if number == "0" and not controllers else controllers.split(",")
        for name in {"pids", "memory", "cpu"}.intersection(names):
            for folder in (root / path.lstrip("/"), root / name / path.lstrip("/"), root / name):
                offers = folder / "cgroup.subtree_control"  # version 2 alone has it
                right = name in offers.read_text().split() if offers.exists() else folder.is_relative_to(root / name)
                if right and os.access(folder, os.W_OK) and (folder / "cgroup.procs").exists():
                    found.setdefault(name, folder)
    return found


class ControlGroup:
    """The control groups of one box, with its bounds as far as this machine lets us set them."""

    def __init__(self, name: str, limits: BoxConfig) -> None:
        self.folders: set[Path] = set()
        self.bounds: set[str] = set()  # what they bound: `pids`, `memory`, `cpu`
        for controller, tree in trees().items():
            with contextlib.suppress(OSError):
                own = tree / name
                own.mkdir(exist_ok=True)
                self.folders.add(own)
                for file, value in _settings(limits)[controller].items():
                    if value is not None and (own / file).exists():
                        (own / file).write_text(str(value))
                        self.bounds.add(controller)

    def enter(self) -> list[str]:
        """What stands before a command, so that it runs in the groups."""
        return ["sh", "-c", "".join(f"echo 0 > {folder}/cgroup.procs; " for folder in self.folders) + 'exec "$@"', "sh"]

    async def remove(self) -> None:
        """Remove the groups. The kernel ends their processes a moment after their box."""
        for _ in range(250):
            for folder in self.folders:
                shutil.rmtree(folder, ignore_errors=True)  # its control files stay, and go with it
            if not any(folder.exists() for folder in self.folders):
                return
            await asyncio.sleep(0.02)


def _settings(limits: BoxConfig) -> Mapping[str, Mapping[str, Any]]:
    size = limits.memory_gb and int(limits.memory_gb * 2**30)
    quota = limits.cpus and int(limits.cpus * PERIOD)
    return {
        "pids": {"pids.max": limits.processes},
        "memory": {"memory.max": size, "memory.swap.max": size and 0, "memory.limit_in_bytes": size},
        "cpu": {"cpu.max": quota and f"{quota} {PERIOD}", "cpu.cfs_period_us": quota and PERIOD, "cpu.cfs_quota_us": quota},
    }
