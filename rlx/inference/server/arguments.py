"""How the configuration becomes vLLM's environment variables and engine arguments.

Pure: knows the configuration and vLLM's names, imports neither vllm nor torch.
The settings that are not the user's were measured; each says what it is for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlx.config.schema import Config

WORKER_EXTENSION = "rlx.inference.server.worker.PolicyWorker"
CPU_BLOCK = 32  # tokens of a cache block: prompts shorter than a block are not shared between rollouts, and vLLM's CPU default is 128


def runs_in_process(config: Config) -> bool:
    """Whether the engine lives in the server's own process: on CPU, where one process costs less than two that talk."""
    return config.hardware.device == "cpu" and config.hardware.tensor_parallel == 1


def environment(config: Config, present: Mapping[str, str]) -> dict[str, str]:
    """Variables to set before vllm is imported. What is in `present` already is the user's and is kept."""
    wanted = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    wanted["VLLM_ENGINE_READY_TIMEOUT_S"] = str(math.ceil(config.inference.startup_timeout))
    if config.hardware.device == "cuda":
        wanted["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a CUDA context does not live through a fork
    if config.hardware.device == "cpu":
        wanted |= {
            "TORCHDYNAMO_DISABLE": "1",  # else the first request waits 12 s for a compiled rank kernel
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the cores are shared with the other roles
            "OMP_NUM_THREADS": str(config.hardware.cpu_threads),
            "VLLM_CPU_ATTN_SPLIT_KV": "0",  # sums in one order for any number of threads
        }
    if runs_in_process(config):
        wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker too is called directly
    return {name: value for name, value in wanted.items() if name not in present}


def engine_arguments(config: Config, model: str, replica: int) -> dict[str, Any]:
    """Arguments of `vllm.engine.arg_utils.AsyncEngineArgs` for policy version 0 at `model`; `inference.vllm` has the last word."""
    inference, hardware = config.inference, config.hardware
    cpu = hardware.device == "cpu"
    arguments: dict[str, Any] = {
        "model": model,
        "served_model_name": [config.model.name],
        "dtype": config.model.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": inference.max_num_seqs,
        "tensor_parallel_size": hardware.tensor_parallel,
        "seed": config.seed * 1024 + replica,  # for requests without a seed of their own; replicas differ
        "trust_remote_code": config.model.trust_remote_code,
        "config_format": "hf",  # left to itself vLLM takes `params.json` and `consolidated.safetensors` where they lie beside the model;
        "load_format": "safetensors",  # the trainer, and so every later version, has the names of the Hugging Face files
        "enforce_eager": cpu if inference.enforce_eager is None else inference.enforce_eager,
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature, as the trainer scores them
        "worker_extension_cls": WORKER_EXTENSION,
        "enable_prefix_caching": True,
        "disable_log_stats": True,  # statistics of single requests; the scheduler's own are always kept
    }
    if cpu:
        arguments |= {
            "enable_chunked_prefill": False,  # a request with a seed kills vLLM's CPU engine in a chunked prefill
            "block_size": CPU_BLOCK,
            "kv_cache_memory_bytes": int(inference.kv_cache_gb * 2**30),
            "max_num_batched_tokens": max(config.max_model_len, 8192),
        }
    else:
        arguments["gpu_memory_utilization"] = inference.gpu_memory_utilization
    arguments |= inference.vllm
    if config.model.dtype != "float32":  # logits rounded to 16 bit cost about 0.03 nats a token, and the trainer's are not
        arguments["hf_overrides"] = {"head_dtype": "float32"} | inference.vllm.get("hf_overrides", {})
    return arguments
