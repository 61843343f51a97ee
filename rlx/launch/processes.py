"""Starts a process that ends with the one that starts it. Finding and killing them is `rlx.descendants`."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlx.descendants import TOKEN, find, kill_all, start_time

__all__ = ["TOKEN", "bound", "find", "kill_all", "start_time"]

BOUND = str(Path(__file__).with_name("bound.py"))


def bound(argv: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The command line of a process that becomes `argv` and that the kernel kills with the thread that starts it, or with this process.

    Not a `preexec_fn`: with one, the child runs Python and all fork handlers of the loaded libraries before `exec`, among them those of
    gRPC and OpenBLAS. In a process with threads they may deadlock or crash. `environment`: the child's; its PATH is searched.
    Raises OSError if there is no such command.
    """
    if shutil.which(argv[0], path=environment.get("PATH", os.defpath)) is None:
        number = errno.EACCES if os.path.exists(argv[0]) else errno.ENOENT
        raise OSError(number, os.strerror(number), argv[0])
    return [sys.executable, "-I", "-S", BOUND, str(os.getpid()), *argv]
