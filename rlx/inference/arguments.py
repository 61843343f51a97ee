"""Turns the configuration into the command line and the environment of a vLLM server. Pure: imports neither vllm nor torch.

    command(…)      python -m vllm.entrypoints.launchers.api_server.entry --model /models/qwen --port 8001 --dtype bfloat16 …
    environment(…)  {"VLLM_SERVER_DEV_MODE": "1", …}

Whoever starts this command in another shell, with RLX_SECRET as the key, has a server that a run can train (`inference.base_url`).
`inference.vllm` passes further options through (`rlx.config.checks.engine` says which).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlx.config.chat_format import template_path
from rlx.config.schema import PlayRoot
from rlx.config.vllm_flags import flags
from rlx.inference import cpu
from rlx.weights.shapes import tensor_shapes

MODULE = "vllm.entrypoints.launchers.api_server.entry"  # what `vllm serve` starts; the command itself fails with the CPU distribution
NAME = "policy"  # under which the base model is served
EXTENSION = "rlx.inference.extension.Policy"
MIDDLEWARE = "rlx.inference.middleware.Secret"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of adapters that vLLM has room for
TABLES = ("lm_head", "embed_tokens", "embed_in", "embed_out", "wte", "wpe")  # matrices that are no layers to adapt
DERIVED = "kv_b_proj"  # of latent attention: vLLM derives its matrices from this weight at the start, and never uses the layer's adapter
EXPERTS = ".experts."  # in the name of a matrix that belongs to one of several experts


def command(config: PlayRoot, model: str, host: str, port: int | str, replica: int = 0, python: str = sys.executable) -> list[str]:
    """The command line of a server of policy version 0, the model in the folder `model`."""
    return [python, "-m", MODULE, *flags({"host": host, "port": port} | options(config, model, replica) | config.inference.vllm)]


def options(config: PlayRoot, model: str, replica: int) -> dict[str, Any]:
    """vLLM's options that rlx decides, by vLLM's names."""
    inference, hardware = config.inference, config.hardware
    on_cpu = hardware.device == "cpu"
    found: dict[str, Any] = {
        "model": model,
        "served_model_name": NAME,
        "dtype": config.model.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": inference.max_num_seqs,
        "tensor_parallel_size": hardware.tensor_parallel,
        "trust_remote_code": config.model.trust_remote_code,
        "seed": (config.seed * 1024 + replica) % 2**32,  # of requests without a seed; it differs between replicas
        "enforce_eager": on_cpu if inference.enforce_eager is None else inference.enforce_eager,
        "config_format": "hf",  # by default vLLM prefers `params.json` and `consolidated.safetensors`, with other tensor names
        "load_format": "safetensors",
        "generation_config": "vllm",  # no sampling defaults from the model's folder
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature, as the trainer computes them
        "enable_prefix_caching": True,
        "enable_scale_out": True,  # the token route
        "worker_extension_cls": EXTENSION,
        "middleware": MIDDLEWARE,
        "uvicorn_log_level": "warning",
        "disable_uvicorn_access_log": True,
    }
    if config.model.dtype != "float32":  # logits rounded to 16 bits are off by about 0.03 nats a token; the trainer's are float32
        found["hf_overrides"] = {"head_dtype": "float32"}
    if config.model.chat_template is not None:  # for vLLM's own chat routes
        found["chat_template"] = str(template_path(config.model.chat_template))
    if config.model.chat_template_kwargs:
        found["default_chat_template_kwargs"] = json.dumps(dict(config.model.chat_template_kwargs))
    if config.lora.enabled:
        found |= adapter_options(config, Path(model))
    if config.transfer is not None:
        found["weight_transfer_config"] = {"backend": config.transfer}
    return found | (cpu.options(config) if on_cpu else {"gpu_memory_utilization": inference.gpu_memory_utilization})


def environment(config: PlayRoot, present: Mapping[str, str]) -> dict[str, str]:
    """Variables of a server. Those in `present` are the user's and are left as they are. The secret (RLX_SECRET) is not among them."""
    wanted = {
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that change weights
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_PLUGINS": "",  # what else is installed here does not change the engine
        "GLOO_SOCKET_IFNAME": "lo",  # its workers are on one host, and nobody else has to reach them
        "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(config.inference.startup_timeout)),
    }
    if config.hardware.device == "cpu":
        wanted |= cpu.variables(config)
    else:
        wanted["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a CUDA context does not survive a fork
        # FlashInfer's sampler returns no processed log-probabilities, so it would never be used, yet vLLM would not start without it.
        wanted["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        if config.model.dtype == "float32":
            wanted["TRITON_F32_DEFAULT"] = "ieee"  # else vLLM's Triton kernels multiply float32 in TF32, with about 1e-3 of error
    if config.lora.enabled:
        wanted["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if config.transfer == "ipc":
        wanted["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # handles of GPU memory are pickled
    return {name: value for name, value in wanted.items() if name not in present}


def adapter_options(config: PlayRoot, model: Path) -> dict[str, Any]:
    """Options for adapters: one name per version, so requests of several versions may be in one batch.

    Raises ValueError if such a server cannot compute the model on a CPU.
    """
    lora = config.lora
    found: dict[str, Any] = {
        "enable_lora": True,
        "max_loras": getattr(config, "max_async_level", -1) + 2,  # versions that requests in flight may have
        "max_lora_rank": next(rank for rank in RANKS if rank >= (lora.rank or 1)),
    }
    if not model.is_dir():  # a plan for a model that is not here yet
        return found
    named, shapes = lora.target_modules != ["all-linear"], tensor_shapes(model)
    matrices = [name.removesuffix(".weight") for name, shape in shapes.items() if name.endswith(".weight") and len(shape) == 2]
    layers = {name.rpartition(".")[2] for name in matrices if EXPERTS not in name} - {*TABLES}
    experts = {name.rpartition(".")[2] for name in matrices if EXPERTS in name}
    targets = {name.rpartition(".")[2] for name in lora.target_modules} if named else layers
    if config.hardware.device == "cpu" and (
        both := sorted(targets & experts)
    ):  # vLLM makes room at the experts, too, with CUDA's operations
        raise ValueError(
            f"vLLM on a CPU cannot serve adapters of {', '.join(both)} in a model whose experts have matrices of these names: "
            f"lora.target_modules={list(lora.target_modules)}.\n  fix: name layers of the attention, like [q_proj,v_proj], or use a GPU"
        )
    if DERIVED in targets:
        others = ",".join(sorted(targets - {DERIVED})) or "q_proj,o_proj"
        raise ValueError(
            f"vLLM loads adapters of {DERIVED} in the latent attention of {model} and does not use them, so it would serve another model "
            f"than the trained one.\n  fix: leave it out in trainer and server: lora.target_modules=[{others}]"
        )
    return found | {"lora_target_modules": sorted(targets)}
