"""What every role does to its own process first: die with its parent, take its share of the CPU, know who sends its signals.

Knows Linux process control only; it never imports torch, it only speaks to one that is already loaded.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
ORPHANED = 1  # exit code when the parent was gone before we could ask to die with it
HOST = "RLX_HOST"  # environment variable with the name by which other hosts of the run reach this one; not set where there is one host
SUPERVISOR = "RLX_SUPERVISOR_PID"  # environment variable by which a supervisor tells its descendants on the same host its process id


def die_with_parent() -> None:
    """Ask the kernel to SIGKILL this process when the thread that started it ends; exit at once if the parent is gone already.

    Gone means: the process named by `RLX_SUPERVISOR_PID` does not live, or, where that is not set, init has adopted us.
    Children do not inherit the request: each calls this itself.
    Raises OSError when the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl(PR_SET_PDEATHSIG): {os.strerror(errno)}")
    supervisor = os.environ.get(SUPERVISOR)
    if os.getppid() == 1 if supervisor is None else not _lives(int(supervisor)):
        print("the parent process is gone; leaving", file=sys.stderr, flush=True)
        os._exit(ORPHANED)


def host_name() -> str:
    """The name by which other hosts reach this one."""
    return os.environ.get(HOST) or socket.gethostname()


def sigterm_is_a_notice() -> bool:
    """Whether SIGTERM says that the machine will be taken away, rather than that this process is to end.

    In a SLURM job it is SLURM that sends it to all steps when it preempts, requeues or cancels the job, some time before SIGKILL; the
    supervisor ends its steps with SIGINT.
    """
    return HOST in os.environ


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def set_cpu_threads(threads: int) -> None:
    """Limit this process's numeric libraries, and those of processes it starts, to `threads` threads each.

    Environment variables reach libraries that are imported later; a torch that is already loaded is told directly.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
