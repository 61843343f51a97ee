"""Becomes a command that the kernel kills with the process that started it: `bound.py PARENT COMMAND …` (`rlx.launch.processes.bound`).

Imports nothing of rlx: it starts in 10 ms.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
CANNOT_START = 127  # the exit code of shells and env(1) for a command that cannot be started


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
