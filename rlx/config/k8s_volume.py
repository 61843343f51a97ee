"""What a process knows of the container or pod that it is in."""

from __future__ import annotations

import os
from pathlib import Path

SYSTEM = frozenset({"bin", "sbin", "usr", "lib", "lib32", "lib64", "libx32", "etc", "opt", "dev", "proc", "sys", "boot", "run"})
"""Folders that in a container are those of its image."""


def in_a_pod() -> bool:
    """Whether this is a host of a run over several (`rlx pod`, which sets the variable where Kubernetes has not)."""
    return "JOB_COMPLETION_INDEX" in os.environ


def in_image_folder(folder: Path) -> bool:
    """Whether a path is a system folder or in one."""
    return folder.is_absolute() and not SYSTEM.isdisjoint(folder.parts[1:2])
