"""Becomes a command that the kernel kills with the process that started it: `bound.py PARENT COMMAND …`, as `bound` has it.

Imports nothing of rlx: it starts in 10 ms.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
from collections.abc import Mapping, Sequence

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
CANNOT_START = 127  # the exit code of shells and env(1) for a command that cannot be started


def bound(argv: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The command line of a process that becomes `argv` and that the kernel kills with the thread that starts it, or with this process.

    Not a `preexec_fn`: with one, the child runs Python and all fork handlers of the loaded libraries before `exec`, among them those of
    gRPC and OpenBLAS. In a process with threads they may deadlock or crash. `environment`: the child's; its PATH is searched.
    Raises OSError if there is no such command.
    """
    import shutil  # not in the process that becomes the command

    if shutil.which(argv[0], path=environment.get("PATH", os.defpath)) is None:
        number = errno.EACCES if os.path.exists(argv[0]) else errno.ENOENT
        raise OSError(number, os.strerror(number), argv[0])
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *argv]


def main(parent: int, command: list[str]) -> int:
    """Does not return if the command starts. PR_SET_PDEATHSIG outlasts `exec`."""
    if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0 or os.getppid() != parent:
        return 1
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and an ignored signal stays ignored
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        return CANNOT_START


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
