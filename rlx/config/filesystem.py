"""Which file system a folder is on."""

from __future__ import annotations

import subprocess
from pathlib import Path


def file_system(folder: Path) -> str:
    """The kind of the file system that a folder is on, in the words of coreutils: `ext2/ext3`, `nfs`, `tmpfs`, `lustre`."""
    return subprocess.run(["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True, check=False).stdout.strip() or "unknown"
