"""The file through which the workers of one engine find each other.

vLLM makes a file `vllm_dist_…` in the temporary folder at every start and leaves it there. Here it is a file in memory, which goes away
with the process, also after SIGKILL. Other processes of the same user open it through /proc.

The workers of a CPU engine also share memory that vLLM names after the last part of this path, the number of the open file. A killed server
leaves that memory behind, and another server may run here. So the number is a random one.
"""

from __future__ import annotations

import fcntl
import os
import random
import resource
import sys

EXECUTORS = ("vllm.v1.executor.uniproc_executor", "vllm.v1.executor.multiproc_executor")


NUMBERS = (1_000, 100_000)  # of the open file, if the system's hard limit allows so many


def file_in_memory() -> str:
    """The URL of a new, empty file in memory. It exists as long as this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = NUMBERS[1] if hard == resource.RLIM_INFINITY else min(NUMBERS[1], hard)
    if 0 <= soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    first = os.memfd_create("rlx_rendezvous")
    try:
        number = fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, random.SystemRandom().randrange(min(NUMBERS[0], most // 2), most - 100))
    finally:
        os.close(first)
    return f"file:///proc/{os.getpid()}/fd/{number}"


def leave_no_files() -> None:
    """Have the engines that this process starts use a file in memory. Call it before the engine starts; spawned processes call it, too."""
    import vllm.utils.network_utils as network

    network.get_file_store_init_method = file_in_memory
    for name in EXECUTORS:  # those imported already have the function by name
        if name in sys.modules:
            sys.modules[name].get_file_store_init_method = file_in_memory  # type: ignore[attr-defined]
