"""Process setup that every role does first: die with the parent, limit CPU threads, interpret SIGTERM.

Linux only. Never imports torch; it only configures a torch that is already loaded.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import os
import resource
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
ORPHANED = 1  # exit code of a process whose parent died before `die_with_parent`
FULL = (errno.ENOSPC, errno.EDQUOT)  # the error numbers of a full disk and a used-up quota
LITTLE = 2**18  # bytes: a disk with less free space counts as full
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
KEPT = 2**30  # bytes: larger allocations, and more free memory than this at the top of the heap, go back to the kernel
RETURNED = 2**20  # bytes: while freed memory is returned, allocations of this size and larger are their own, outside of the heap
MOST = 2**25  # bytes: the largest size of the kind that every version of the library accepts, and that its own rule ends at
HOST = "RLX_HOST"  # environment variable: the name by which other hosts of the run reach this one; set only in steps of a SLURM job
TODAY = "RLX_TODAY"  # environment variable: an ISO date
SUPERVISOR = "RLX_SUPERVISOR_PID"  # environment variable: the supervisor's process id, for its descendants on the same host

_keeps = False  # whether `keep_freed_memory` was called


def die_with_parent() -> None:
    """Ask the kernel to SIGKILL this process when the thread that started it ends; exit at once if the parent is already gone.

    The parent is gone if the process `RLX_SUPERVISOR_PID` is not alive or, without that variable, if init has adopted this process.
    Children do not inherit the request: each calls this function itself.
    Raises OSError if the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl(PR_SET_PDEATHSIG): {os.strerror(errno)}")
    supervisor = os.environ.get(SUPERVISOR)
    if os.getppid() == 1 if supervisor is None else not Path(f"/proc/{supervisor}").exists():
        print("the parent process is gone; leaving", file=sys.stderr, flush=True)
        os._exit(ORPHANED)


def today() -> datetime:
    """The day that a template may put into a prompt (`strftime_now`): that on which the run began, in all its attempts; else this one."""
    begun = os.environ.get(TODAY)
    return datetime.fromisoformat(begun) if begun else datetime.now()


def host_name() -> str:
    """The name by which other hosts of the run reach this host."""
    return os.environ.get(HOST) or socket.gethostname()


def sigterm_is_a_notice() -> bool:
    """Whether SIGTERM announces that the machine will be taken away, instead of asking this process to stop.

    In a SLURM job, SLURM sends SIGTERM to all steps when it preempts, requeues or cancels the job, some time before SIGKILL. The
    supervisor stops its steps with SIGINT.
    """
    return HOST in os.environ


def peak_memory() -> int:
    """Bytes of the largest resident memory of this process so far, with pages that it shares with others.

    Linux's own number for `resource.getrusage` may be that of the process which started this one.
    """
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    # A sandbox with a /proc of its own may leave the line out.
    other = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), other)


def set_cpu_threads(threads: int) -> None:
    """Limit numeric libraries in this process, and in processes that it starts, to `threads` threads each.

    Environment variables reach libraries that are imported later. A torch that is already loaded is set directly.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)


def keep_freed_memory() -> None:
    """Let the C library's allocator keep what is freed, for the next allocation of this process.

    A step on CPU frees and allocates the same tensors over and over. By default the large ones go back to the kernel each time, which then
    hands out zeroed pages one by one: about a tenth of a small model's step. Does nothing where the library has no such settings.
    """
    global _keeps
    mallopt = _mallopt()
    # The second threshold alone would fix the first at its low initial value. Some versions accept no more than 32 MiB for the first.
    if mallopt is not None and (mallopt(M_MMAP_THRESHOLD, KEPT) or mallopt(M_MMAP_THRESHOLD, MOST)):
        mallopt(M_TRIM_THRESHOLD, KEPT)
        _keeps = True


@contextmanager
def freed_memory_returned() -> Iterator[None]:
    """Let the C library's allocator return what is freed to the kernel at once; also a decorator.

    For work with many large tensors that are each needed once. In a heap, small allocations that stay divide the freed space, and the next
    tensor of the same size no longer fits. At the end `keep_freed_memory` holds again, or else about what the library does by itself.
    """
    mallopt = _mallopt()
    if mallopt is None or not mallopt(M_MMAP_THRESHOLD, RETURNED):
        yield
        return
    try:
        yield
    finally:
        if _keeps:
            keep_freed_memory()
        else:
            mallopt(M_MMAP_THRESHOLD, MOST)
            mallopt(M_TRIM_THRESHOLD, 2 * MOST)


def _mallopt() -> Callable[[int, int], int] | None:
    return getattr(ctypes.CDLL(None), "mallopt", None)


def disk_is_full(run_dir: Path) -> bool:
    """Whether nothing more can be written into a run's directory, so that an error may be missing in a log."""
    try:
        return shutil.disk_usage(run_dir).free < LITTLE
    except OSError:
        return False


def end_at_once(main: Callable[[], int]) -> NoReturn:
    """Run a role's `main`, then end the process with its exit code. Any exception is printed with its traceback: code 1.

    Waits for no thread and runs no `atexit` function: `main` has finished what matters. A reward function may hang in a thread, vLLM's
    threads do not end by themselves, and a thread of torch's gloo that outlives its process group sometimes aborts an interpreter that
    shuts down, after all work is done (pytorch issue 190489).
    """
    try:
        code = main()
    except SystemExit as leaving:  # with the code that Python gives a process for it
        code = leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the log may be on a full disk
            stream.flush()
    os._exit(code)


@contextmanager
def importing() -> Iterator[None]:
    """Around an import of large libraries. No garbage collection runs, and later ones do not walk over what was imported.

    verifiers, vLLM and transformers make half a million objects each that all stay. Collections take a fifth to a quarter of that time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def pretend_missing(library: str) -> Iterator[None]:
    """Within, `library` counts as not installed, unless it is loaded already.

    transformers imports torch wherever it finds it, which takes seconds and 200 MB; a tokenizer needs none of it. transformers remembers
    what it has found, so use this only in a process that needs nothing else of transformers.
    """
    if library in sys.modules:
        yield
        return
    sys.modules[library] = None  # type: ignore[assignment]  # Python's own way of saying that an import fails
    try:
        yield
    finally:
        del sys.modules[library]


def keep_event_loop_free() -> None:
    """Call it when everything that stays is loaded, before an event loop with a thousand rollouts runs.

    Full garbage collections walk over every rollout in flight: 0.1 to 0.3 s each, every few hundred rollouts with Python's thresholds.
    Here what is loaded is never walked over, a full collection comes after ten million new objects, and the small ones come often: one of
    25,000 objects would block the loop for 20 ms.
    A thread that writes files gives the interpreter back after 1 ms instead of 5.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(2000, 1, 2500)
    sys.setswitchinterval(0.001)
