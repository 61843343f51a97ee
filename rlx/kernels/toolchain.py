"""Check whether Triton can compile and launch a kernel here. A role checks once at its start, not after minutes of loading and rollouts.

When Triton launches its first kernel, it builds its driver bindings with a C compiler and Python's headers.

`python -m rlx.kernels.toolchain` checks for an inference server, in a process of its own: the server's process holds no memory of a GPU.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from rlx.process import die_with_parent

OF_TRAINER = "; or do without Triton: model.logprob_backend=torch model.liger=false"
OF_SERVER = "; vLLM needs it"


def check_triton(start: Callable[[], None] | None = None, remedy: str = OF_TRAINER) -> None:
    """Raise ValueError, naming the missing part, unless a small kernel compiles and launches on the current CUDA device.

    `start` compiles and launches it; None means `launch`. `remedy` ends the message.
    """
    try:
        (start or launch)()
    except Exception as error:  # Triton, its compiler, the C compiler, the loader and the driver each raise their own types
        raise ValueError(
            f"Triton cannot compile a kernel on this machine: {missing_part() or f'{type(error).__name__}: {error}'}{remedy}"
        ) from error


def launch(device: str = "cuda") -> None:
    """Compile and launch the op's own forward kernel on one row."""
    import torch

    from rlx.kernels import rows_triton
    from rlx.kernels.tiles import LogitTransform, Sums

    x, sums = torch.zeros(1, 16, device=device), Sums.start(1, torch.float32, torch.device(device))
    rows_triton.accumulate_tile(
        x, sums, torch.zeros(1, dtype=torch.int64, device=device), x[0, :1] + 1, None, LogitTransform(1.0, None), None
    )
    assert sums.total.tolist() == [16.0], sums


def missing_part() -> str | None:
    """What Triton needs and this machine lacks, and how to get it; `None` if every known part is there."""
    given = os.environ.get("CC")
    if given is not None and shutil.which(given) is None:
        return f"CC is `{given}`, but there is no such program; unset it, or set it to a C compiler"
    if given is None and shutil.which("gcc") is None and shutil.which("clang") is None:
        return "it needs a C compiler, but neither gcc nor clang is on PATH; install one (apt-get install gcc; module load gcc), or set CC"
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").is_file():
        version = sysconfig.get_python_version()
        return (
            f"it needs Python's headers, but there is no {headers / 'Python.h'}; install them (apt-get install python{version}-dev; "
            f"dnf install python{version}-devel), or use a Python that has them, such as uv's"
        )
    return None


def main() -> int:
    die_with_parent()
    try:
        check_triton(remedy=OF_SERVER)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
