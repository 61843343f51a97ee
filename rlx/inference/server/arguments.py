"""Turns the configuration into vLLM's environment variables and engine arguments.

The functions are pure and import neither vllm nor torch. Fixed settings were measured; a comment gives the reason for each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlx.config.kv_cache import CPU_BLOCK, kv_cache_bytes
from rlx.config.schema import HardwareConfig, LoraConfig, PlayRoot
from rlx.config.tree import show
from rlx.inference.server.parts import Meeting
from rlx.inference.server.policy_files import expert_layers, linear_layers, tensor_shapes

WORKER_EXTENSION = "rlx.inference.server.worker.PolicyWorker"
CPU_NORMS = "rlx_cpu"  # the name of `norms.py` among the implementations of vLLM's operations
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has room for


def runs_in_process(config: PlayRoot) -> bool:
    """Whether the engine runs in the server's process. True on one CPU process: a second process would cost more."""
    hardware = config.hardware
    return hardware.device == "cpu" and hardware.tensor_parallel == hardware.data_parallel == 1


def environment(config: PlayRoot, present: Mapping[str, str]) -> dict[str, str]:
    """Variables to set before vllm is imported. Variables in `present` are the user's and are kept."""
    wanted = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    wanted["VLLM_ENGINE_READY_TIMEOUT_S"] = str(math.ceil(config.inference.startup_timeout))
    if config.hardware.device == "cuda":
        wanted["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a CUDA context does not survive a fork
        # FlashInfer's sampler returns no processed log-probabilities, so it would never be used, yet vLLM would not start without it.
        wanted["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        if config.model.dtype == "float32":
            wanted["TRITON_F32_DEFAULT"] = "ieee"  # else vLLM's Triton kernels multiply float32 in TF32, with about 1e-3 of error
    if config.hardware.device == "cpu":
        wanted |= {
            "TORCHDYNAMO_DISABLE": "1",  # otherwise the first request waits 12 s for a compiled rank kernel
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the other roles use the cores, too
            "OMP_NUM_THREADS": str(config.hardware.cpu_threads),
            "VLLM_CPU_ATTN_SPLIT_KV": "0",  # the same order of sums for any number of threads
        }
    if config.transfer == "ipc":
        wanted["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # handles of GPU memory are pickled
    if runs_in_process(config):
        wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker is called directly, too
    return {name: value for name, value in wanted.items() if name not in present}


def adapter_arguments(lora: LoraConfig, model: Path, *, cpu: bool = False) -> dict[str, Any]:
    """Arguments for an engine that serves one adapter. It has room only for adapters of the trained layers.

    Raises ValueError if such an engine cannot compute the model on a CPU.
    """
    named, shapes = lora.target_modules != ["all-linear"], tensor_shapes(model)
    targets = {name.rpartition(".")[2] for name in lora.target_modules} if named else set(linear_layers(shapes))
    if cpu and (shared := targets & expert_layers(shapes)):  # vLLM makes room at the experts, too, with operations of CUDA's
        raise ValueError(
            f"vLLM on a CPU cannot serve adapters of {', '.join(sorted(shared))} in a model whose experts have matrices of these names: "
            f"lora.target_modules={show(lora.target_modules)}. Name layers of the attention alone, like [q_proj,v_proj], or use a GPU"
        )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in RANKS if rank >= (lora.rank or 1)),
        "lora_target_modules": sorted(targets),
    }


def data_parallel_arguments(hardware: HardwareConfig, meeting: Meeting | None, part: int) -> dict[str, Any]:
    """Arguments for the engines in one part of a server; none if there is one engine. `meeting`: None if there is one part."""
    if hardware.data_parallel == 1:
        return {}
    arguments: dict[str, Any] = {"data_parallel_size": hardware.data_parallel, "data_parallel_size_local": hardware.engines_on_host}
    if meeting is not None:
        arguments |= {"data_parallel_address": meeting.address, "data_parallel_rpc_port": meeting.rpc_port}
    if part:
        arguments["data_parallel_start_rank"] = part * hardware.engines_on_host
    return arguments


def engine_arguments(config: PlayRoot, model: str, replica: int, meeting: Meeting | None = None, part: int = 0) -> dict[str, Any]:
    """Arguments of `vllm.engine.arg_utils.AsyncEngineArgs` for policy version 0 at `model`. `inference.vllm` overrides them.

    `meeting` and `part` if the server has several (`parts.py`).
    """
    inference, hardware = config.inference, config.hardware
    cpu = hardware.device == "cpu"
    arguments: dict[str, Any] = {
        "model": model,
        "served_model_name": [config.model.name],
        "dtype": config.model.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": -(-inference.max_num_seqs // hardware.data_parallel),
        "tensor_parallel_size": hardware.tensor_parallel,
        # For requests without their own seed; it differs between replicas. vLLM seeds numpy with it, which takes 32 bits.
        "seed": (config.seed * 1024 + replica) % 2**32,
        "trust_remote_code": config.model.trust_remote_code,
        # By default vLLM prefers `params.json` and `consolidated.safetensors` if the folder has them. The trainer and all later versions
        # use the tensor names of the Hugging Face files.
        "config_format": "hf",
        "load_format": "safetensors",
        "enforce_eager": cpu if inference.enforce_eager is None else inference.enforce_eager,
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature, as the trainer computes them
        "worker_extension_cls": WORKER_EXTENSION,
        "enable_prefix_caching": True,
        "disable_log_stats": True,  # only the statistics of single requests; the core always keeps the scheduler's
    }
    if cpu:
        arguments |= {
            "enable_chunked_prefill": False,  # vLLM's CPU engine crashes on a request with a seed in a chunked prefill
            "block_size": CPU_BLOCK,
            "kv_cache_memory_bytes": kv_cache_bytes(config),
            "max_num_batched_tokens": max(config.max_model_len, 8192),
        }
        if "kernel_config" not in inference.vllm:  # vLLM refuses priorities in both places
            arguments["ir_op_priority"] = {"rms_norm": [CPU_NORMS], "fused_add_rms_norm": [CPU_NORMS]}
    else:
        arguments["gpu_memory_utilization"] = inference.gpu_memory_utilization
    arguments |= data_parallel_arguments(hardware, meeting, part)
    if config.lora.on:
        arguments |= adapter_arguments(config.lora, Path(model), cpu=config.hardware.device == "cpu")
    if config.transfer is not None:
        arguments["weight_transfer_config"] = {"backend": config.transfer}
    arguments |= inference.vllm
    if config.model.dtype != "float32":  # logits rounded to 16 bit are off by about 0.03 nats a token; the trainer's are float32
        arguments["hf_overrides"] = {"head_dtype": "float32"} | inference.vllm.get("hf_overrides", {})
    return arguments
