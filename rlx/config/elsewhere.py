"""What only the pods of a Kubernetes cluster can look at: files on their volume, unless it is mounted here too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

SYSTEM = frozenset({"bin", "sbin", "usr", "lib", "lib32", "lib64", "libx32", "etc", "opt", "dev", "proc", "sys", "boot", "run"})
"""Folders that in a container are those of its image."""


def in_a_pod() -> bool:
    """Whether this is a host of a run already (`rlx pod`): Kubernetes sets the variable in the pods of an indexed Job."""
    return "JOB_COMPLETION_INDEX" in os.environ


def is_away(launcher: object, mount: object) -> bool:
    """Whether a run of this launcher has its files on a volume that is not mounted here."""
    return launcher == "kubernetes" and not Path(str(mount)).is_dir()


def is_elsewhere(cfg: Any) -> bool:
    """Whether the run's files are on a volume of a Kubernetes cluster that is not mounted here, so that only the pods can check them."""
    return is_away(cfg.launcher.name, cfg.kubernetes.mount)


def has_weights_elsewhere(cfg: Any) -> bool:
    """Whether the command plays with weights of a run that only the pods can read. They then take the model and more from that run."""
    return getattr(cfg, "weights_dir", None) is not None and is_elsewhere(cfg)


def is_the_images(folder: Path) -> bool:
    """Whether a path is a system folder or in one."""
    return folder.is_absolute() and not SYSTEM.isdisjoint(folder.parts[1:2])
