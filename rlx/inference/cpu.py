"""What vLLM's CPU build needs beside the options of every server: variables and options, each with its reason. Measured with 0.32."""

from __future__ import annotations

from typing import Any

from rlx.config.memory import CPU_BLOCK, kv_cache_bytes
from rlx.config.schema import PlayRoot


def variables(config: PlayRoot) -> dict[str, str]:
    """Environment variables of a server on a CPU."""
    alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if config.hardware.tensor_parallel == 1 else {}
    return alone | {  # alone: the engine's process has its worker, instead of a third process that imports everything anew
        "TORCHDYNAMO_DISABLE": "1",  # otherwise the first request waits 12 s for a compiled kernel
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the other roles use the cores, too
        "VLLM_CPU_ATTN_SPLIT_KV": "0",  # the same order of sums for any number of threads
        "OMP_NUM_THREADS": str(config.hardware.cpu_threads),
    }


def options(config: PlayRoot) -> dict[str, Any]:
    """Options of a server on a CPU, by vLLM's names."""
    return {
        "enable_chunked_prefill": False,  # the engine dies of a request with a seed whose prefill is cut, as every update cuts it
        "max_num_batched_tokens": max(config.max_model_len, 8192),  # so a whole prompt fits in one step
        "block_size": CPU_BLOCK,
        "kv_cache_memory_bytes": kv_cache_bytes(config),  # vLLM would take 4 GiB or a share of the host
    }
