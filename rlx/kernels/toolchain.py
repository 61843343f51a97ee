"""Whether Triton can compile and start a kernel on this machine: asked once when a role starts, not after minutes of loading and rollouts.

Triton builds its access to the driver with a C compiler and Python's headers, when its first kernel is launched.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path


def check_triton(start: Callable[[], None] | None = None) -> None:
    """Raise ValueError that names what is missing unless a small kernel can be compiled and launched on the current CUDA device.

    `start` does it; None: `launch`.
    """
    try:
        (start or launch)()
    except Exception as error:  # of Triton, its compiler, the C compiler, the loader, the driver: each has its own kinds
        raise ValueError(
            f"Triton cannot compile a kernel on this machine: {_missing(error)}; "
            "or do without Triton: model.logprob_backend=torch model.liger=false"
        ) from error


def launch(device: str = "cuda") -> None:
    """Compile and launch the op's own forward kernel on one row."""
    import torch

    from rlx.kernels import rows_triton
    from rlx.kernels.tiles import Form, Sums

    x, sums = torch.zeros(1, 16, device=device), Sums.start(1, torch.float32, torch.device(device))
    rows_triton.absorb(x, sums, torch.zeros(1, dtype=torch.int64, device=device), x[0, :1] + 1, None, Form(1.0, None), None)
    assert sums.total.tolist() == [16.0], sums


def _missing(error: Exception) -> str:
    """What is not there and how to get it; the error itself where all is there that is known to be needed."""
    given = os.environ.get("CC")
    if given is not None and shutil.which(given) is None:
        return f"CC is `{given}`, and there is no such program; unset it, or set it to a C compiler"
    if given is None and shutil.which("gcc") is None and shutil.which("clang") is None:
        return "it needs a C compiler, and neither gcc nor clang is on PATH; install one (apt-get install gcc; module load gcc), or set CC"
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").is_file():
        version = sysconfig.get_python_version()
        return (
            f"it needs Python's headers, and there is no {headers / 'Python.h'}; install them (apt-get install python{version}-dev; "
            f"dnf install python{version}-devel), or take a Python that has them, as uv's do"
        )
    return f"{type(error).__name__}: {error}"
