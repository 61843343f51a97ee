"""What the NVIDIA driver of this machine supports, compared with the CUDA that torch is built for.

Standard library only: `tools/install.py` uses it before anything is installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess

DRIVERS = {12: "525", 13: "580"}  # oldest NVIDIA driver for each major CUDA version; later minor versions run on it


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA version that the NVIDIA driver supports, from nvidia-smi; `None` if unknown."""
    if not shutil.which("nvidia-smi"):
        return None
    said = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else None


def too_old(have: tuple[int, int] | None, need: int | None) -> str | None:
    """The driver that is needed, `driver 580 or newer`, if this one is too old for CUDA `need`; `None` if it is not, or not known."""
    if have is None or need is None or have[0] >= need:
        return None
    return f"driver {DRIVERS[need]} or newer" if need in DRIVERS else "a newer driver"
