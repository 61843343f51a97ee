"""What a process does with vLLM before it starts an engine: the head of a server, and each part without an address (`parts.py`)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.network_utils import get_tcp_uri
from vllm.v1.engine.utils import CoreEngineProcManager
from vllm.v1.executor import Executor

from rlx.config.schema_model import CPU_WIDTHS
from rlx.inference.server.adapter import compute_experts_plainly, multiply_plainly
from rlx.inference.server.draws import shorten_steps
from rlx.inference.server.exchange import exchange_on_cpu
from rlx.inference.server.kept import keep_weights
from rlx.inference.server.norms import offer_kernels
from rlx.inference.server.rendezvous import leave_no_files
from rlx.inference.server.scheduler import keep_running
from rlx.process import keep_freed_memory

DERIVED = "kv_b_proj"  # the layer of latent attention from whose weight vLLM derives others


def engine_config(arguments: dict[str, Any], *, cpu: bool, headless: bool = False) -> VllmConfig:
    """vLLM's configuration of an engine that starts in this process or is forked from it, which is changed as rlx needs it."""
    leave_no_files()
    config = AsyncEngineArgs(**arguments).create_engine_config(UsageContext.OPENAI_API_SERVER, headless=headless)
    keep_running(config.scheduler_config)
    if config.lora_config is not None:
        refuse_unused_adapters(config.model_config, config.lora_config.target_modules or ())
    if cpu:
        refuse_widths(config.model_config)
        keep_freed_memory(one_heap=True)  # a version's packed weights take the place of the old ones
        keep_weights()
        multiply_plainly()
        compute_experts_plainly()
        offer_kernels()
        shorten_steps()
        exchange_on_cpu()
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # vLLM's CPU platform has just set spawn, which takes 10 s longer
    return config


def refuse_unused_adapters(model: ModelConfig, targets: Iterable[str]) -> None:
    """Raise ValueError if an engine with room for adapters of these layers would load some of them and not use them.

    For latent attention (MLA) vLLM derives its matrices from the weight of `kv_b_proj` when it loads the model, and never calls the layer's
    adapter. The comparison with the trained adapters would find them equal.
    """
    names = sorted(set(targets))
    if model.use_mla and DERIVED in names:
        others = ",".join(name for name in names if name != DERIVED)
        raise ValueError(
            f"vLLM does not use adapters of {DERIVED} in the latent attention of {model.model}, so it would serve another model than the "
            f"trained one. Leave it out in trainer and server: lora.target_modules=[{others or 'q_proj,o_proj'}]"
        )


def refuse_widths(model: ModelConfig) -> None:
    """Raise ValueError if vLLM cannot compute the model's attention on a CPU. It would start, and end at its first request."""
    width = model.get_head_size()
    if not (model.use_mla or model.is_attention_free) and width not in CPU_WIDTHS:
        raise ValueError(
            f"vLLM computes no attention with heads {width} wide on a CPU, and {model.model} has such heads. "
            f"It computes widths of {', '.join(map(str, CPU_WIDTHS))}. Use another model, or a GPU"
        )


def headless_engines(arguments: dict[str, Any], *, cpu: bool) -> CoreEngineProcManager:
    """Start the engines of a part, each in a process of its own. They ask the head's vLLM for their place."""
    config = engine_config(arguments, cpu=cpu, headless=True)
    parallel = config.parallel_config
    return CoreEngineProcManager(
        local_engine_count=parallel.data_parallel_size_local,
        start_index=parallel.data_parallel_rank,
        local_start_index=0,
        vllm_config=config,
        local_client=False,
        handshake_address=get_tcp_uri(parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port),
        executor_class=Executor.get_class(config),
        log_stats=True,  # the core reports every step, as the head's does
    )
