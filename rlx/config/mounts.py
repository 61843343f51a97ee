"""Which file system a folder is on, and whether that is in memory."""

from __future__ import annotations

from pathlib import Path

IN_MEMORY = ("tmpfs", "ramfs")


def file_system(folder: Path) -> str:
    """The kind of the file system that a folder is on: `ext4`, `nfs4`, `lustre`; `unknown` if the kernel does not list it."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    path = str(folder.resolve())
    inside = [(place, kind) for place, kind in mounts if path == place or path.startswith(place.rstrip("/") + "/")]
    return max(inside, key=lambda mount: len(mount[0]), default=("", "unknown"))[1]
