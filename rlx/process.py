"""What every role does to its own process first: die with its parent, take its share of the CPU, know who sends its signals.
And what it says last when a full disk ends it.

Knows Linux process control only; it never imports torch, it only speaks to one that is already loaded.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
ORPHANED = 1  # exit code when the parent was gone before we could ask to die with it
FULL = (errno.ENOSPC, errno.EDQUOT)  # what the system says of a full disk, and of a quota that is used up
LITTLE = 2**18  # bytes: with less room than this a disk is full
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


def full_disk(error: BaseException, run_dir: Path) -> str | None:
    """What a person reads where a disk or a quota is full, in one line; None where that is not what happened.

    Found in whatever `error` wraps too: in exception groups, and among the exceptions that it was raised from or during.
    """
    found = next(((each, number) for each in _all_of(error) if (number := _full(each)) is not None), None)
    if found is None:
        return None
    filename = getattr(found[0], "filename", None)
    path = Path(os.fsdecode(filename)) if isinstance(filename, str | bytes) else run_dir
    what = "the quota is used up" if found[1] == errno.EDQUOT else "the disk is full"
    remedy = "free space there, or move the run's directory and name it by run.dir=; then go on with resume=latest"
    return f"{what}: {path} could not be written, {_space(path)}; {remedy}"


def disk_is_full(run_dir: Path) -> str | None:
    """The same line where nothing more can be written to a run's directory; None: there is room."""
    try:
        has_room = shutil.disk_usage(run_dir).free >= LITTLE
    except OSError:
        return None
    return None if has_room else full_disk(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), run_dir)


def _full(error: BaseException) -> int | None:
    """ENOSPC or EDQUOT where an exception is about one of them; safetensors and torch raise others with the system's words."""
    if isinstance(error, OSError) and error.errno in FULL:
        return error.errno
    return next((number for number in FULL if os.strerror(number) in str(error)), None)


def _all_of(error: BaseException) -> Iterator[BaseException]:
    """An exception, and all that it holds or came from."""
    waiting, seen = [error], set()
    while waiting:
        each = waiting.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [other for other in (each.__cause__, each.__context__) if other is not None]
        if isinstance(each, BaseExceptionGroup):
            waiting += each.exceptions


def _space(path: Path) -> str:
    """The file system that a path is on, and what is left of it."""
    folder = next((each for each in (path, *path.parents) if each.is_dir()), Path("/"))
    try:
        mount = next(each for each in (folder.resolve(), *folder.resolve().parents) if os.path.ismount(each))
        usage = shutil.disk_usage(folder)
    except OSError:
        return f"file system of {folder}"
    return f"file system {mount} has {usage.free / 2**20:,.0f} MiB left of {usage.total / 2**20:,.0f} MiB"


def say_full_disk(main: Callable[[], int]) -> int:
    """The exit code of a role's `main`; where a full disk ends it, that is said in one line, last, and the code is 1.

    What `main` raises for another reason is raised. The run's directory is what the command line names with --run-dir.
    """
    try:
        return main()
    except Exception as error:
        parser = argparse.ArgumentParser(add_help=False)
        parser.add_argument("--run-dir", type=Path, default=Path())
        line = full_disk(error, parser.parse_known_args()[0].run_dir)
        if line is None:
            raise
        with suppress(OSError):  # the log may be on that disk
            if not isinstance(error, OSError | BaseExceptionGroup):
                print(str(error).partition("\n")[0], file=sys.stderr)  # what it was doing
            print(line, file=sys.stderr, flush=True)
        return 1
