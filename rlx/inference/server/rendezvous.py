"""The file through which the workers of one engine find each other.

vLLM makes a file `vllm_dist_…` in the temporary folder at every start and leaves it there. Here it is a file in memory, which goes away
with the process, also after SIGKILL. Other processes of the same user open it through /proc.
"""

from __future__ import annotations

import os
import sys

EXECUTORS = ("vllm.v1.executor.uniproc_executor", "vllm.v1.executor.multiproc_executor")


def file_in_memory() -> str:
    """The URL of a new, empty file in memory. It exists as long as this process."""
    return f"file:///proc/{os.getpid()}/fd/{os.memfd_create('rlx_rendezvous')}"


def leave_no_files() -> None:
    """Have the engines that this process starts use a file in memory. Call it before the engine starts; spawned processes call it, too."""
    import vllm.utils.network_utils as network

    network.get_file_store_init_method = file_in_memory
    for name in EXECUTORS:  # those imported already have the function by name
        if name in sys.modules:
            sys.modules[name].get_file_store_init_method = file_in_memory  # type: ignore[attr-defined]
