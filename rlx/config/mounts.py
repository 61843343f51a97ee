"""Which file system a folder is on, and whether that is in memory."""

from __future__ import annotations

import os
from pathlib import Path

IN_MEMORY = ("tmpfs", "ramfs")
MOUNTS = Path("/proc/self/mountinfo")


def file_system(folder: Path) -> str:
    """The kind of the file system that a folder is on: `ext4`, `nfs4`, `lustre`; `unknown` if the kernel does not list it.

    Found by its device. Where that is not listed (btrfs), by the longest mount point that holds the folder.
    """
    device, path = folder.stat().st_dev, str(folder.resolve())
    holds: list[tuple[int, str]] = []
    for line in MOUNTS.read_text().splitlines() if MOUNTS.exists() else ():
        mount, _, source = line.partition(" - ")
        number, place, kind = mount.split()[2], mount.split()[4].replace("\\040", " "), source.split()[0]
        if number == f"{os.major(device)}:{os.minor(device)}":
            return kind
        if path == place or path.startswith(place.rstrip("/") + "/"):
            holds.append((len(place), kind))
    return max(holds, default=(0, "unknown"))[1]
