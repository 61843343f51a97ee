"""What the plan says of memory, by the estimates of `rlx.config.memory`: the trainer's, the servers', and whether both fit the GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlx.config.gpus import gpu_memory, visible_gpus
from rlx.config.memory import (
    TrainerMemory,
    engine_memory,
    kv_cache_bytes,
    size,
    trained_parameters,
    trainer_memory,
    versions_in_memory,
)
from rlx.config.oom_hints import remedies
from rlx.config.schema import CommandConfig, PlayRoot, TrainingRoot
from rlx.plan.process_spec import ProcessSpec


def memory_lines(cfg: CommandConfig, plan: Sequence[ProcessSpec]) -> list[str]:
    """The memory of each process of a plan, and whether it fits."""
    lines = []
    if isinstance(cfg, TrainingRoot) and cfg.uses_shared_trainer:
        lines.append(f"trainer: elsewhere ({cfg.trainer.shared_trainer_dir}); a dry run of its own command shows its memory")
    elif isinstance(cfg, TrainingRoot) and cfg.started_trainer_ranks:
        lines += _of_trainer(cfg, trainer_memory(cfg))
    if isinstance(cfg, PlayRoot) and any(spec.role == "inference" for spec in plan):
        lines += _of_servers(cfg)
    elif isinstance(cfg, PlayRoot) and cfg.inference.base_url and cfg.generates_rollouts:
        lines.append(f"inference: elsewhere ({', '.join(cfg.inference.base_url)})")
    return [*lines, *fit_lines(cfg)]


def fit_lines(cfg: CommandConfig, only_wrong: bool = False) -> list[str]:
    """Whether the trainer and a server fit the memory of a GPU, as far as that is known; what does not, with the keys that help.

    `only_wrong`: leave out what fits.
    """
    servers = cfg if isinstance(cfg, PlayRoot) and cfg.started_servers else None
    share = servers.inference.gpu_memory_utilization if servers is not None else 0.0
    needs: list[tuple[str, float, float, list[str]]] = []  # who, bytes that it needs, its share of a GPU, what helps
    if isinstance(cfg, TrainingRoot) and cfg.started_trainer_ranks:
        needs.append(("the trainer", trainer_memory(cfg).device, 1 - share if cfg.hardware.colocate else 1.0, remedies(cfg)))
    if servers is not None:
        engine = engine_memory(servers)
        fix = "a larger hardware.tensor_parallel or inference.gpu_memory_utilization, a smaller inference.max_model_len, or another model"
        needs.append(("a server", engine.weights + engine.kv_longest, share, [fix]))
    if not needs or cfg.num_gpus == 0:
        return []
    card = _card(cfg)
    if card is None:
        least = max(need / share if share > 0 else math.inf for _, need, share, _ in needs)
        return [] if only_wrong else [f"each GPU must have at least {size(least)}; hardware.gpu_memory_gb=… says whether it has"]
    lines = []
    for who, need, share, fixes in needs:
        shown = f"{size(need)} of each GPU, and {size(card * share)} of {size(card)} are there for it"
        if need > card * share:
            lines += [f"does not fit: {who} needs {shown}", *(f"  {line}" for line in fixes)]
        elif not only_wrong:
            lines.append(f"fits: {who} needs {shown}")
    return lines


def _card(cfg: CommandConfig) -> float | None:
    """Bytes of a GPU of the run; None if they are not known."""
    if cfg.hardware.gpu_memory_gb is not None:
        return cfg.hardware.gpu_memory_gb * 2**30
    here = cfg.launcher.name == "local" and cfg.num_gpus <= visible_gpus()  # else it is a plan for another machine
    return gpu_memory() if here else None


def _of_servers(cfg: PlayRoot) -> list[str]:
    engine = engine_memory(cfg)
    each = f"weights {size(engine.weights)}, KV cache {size(engine.kv_token)} per token"
    full = f"{size(engine.kv_wanted)} would hold all concurrent sequences at full length; they need less if they share prompts"
    if cfg.hardware.device == "cuda":
        taken = f"it takes {cfg.inference.gpu_memory_utilization:.0%} of the card (inference.gpu_memory_utilization)"
        return [f"inference, each GPU: {each}", f"  {taken}; {full}"]
    budget = kv_cache_bytes(cfg)
    tokens = budget / engine.kv_token
    kept = f"KV cache {size(budget)} (inference.kv_cache_gb): {tokens:,.0f} tokens, {tokens / cfg.seq_len:,.0f} sequences of full length"
    return [f"inference, each server: {each}", f"  {kept}; {full}"]


def _of_trainer(cfg: TrainingRoot, memory: TrainerMemory) -> list[str]:
    """The parts of the trainer's memory, one line each, with the arithmetic."""
    ranks, row = cfg.trainer_ranks // cfg.trainer.dp_replicate, cfg.micro_batch_tokens
    numbers = f"{cfg.model.num_parameters / 1e9:.3g}e9 parameters" + (f" / {ranks} ranks" if ranks > 1 else "")
    if cfg.lora.enabled:
        runs = f", one for each of {cfg.trainer.max_concurrent_runs} runs" if cfg.is_shared_trainer else ""
        numbers += f", frozen; at most {trained_parameters(cfg) / 1e6:,.3g} million of adapters of rank {cfg.lora.rank}{runs}"
    where, apart = "in host memory, " if memory.on_host else "", memory.optimizer_on_host
    again = cfg.reshards  # gathered again for backward
    tables = f"vocabulary {cfg.model.vocab_size:,} × width {cfg.model.hidden_size:,}"
    peak = max(memory.moments, key=lambda name: memory.moments[name])
    parts = [
        (memory.parameters + memory.gradients + (0.0 if apart else memory.optimizer), f"{where}parameters {size(memory.parameters)}, "
         f"gradients {size(memory.gradients)}{'' if apart else f', optimizer {size(memory.optimizer)}'}: {numbers}"),
        (memory.reference, f"{where}reference model, frozen"),
        (memory.context, "the process on the GPU: context, workspaces, NCCL"),
        (memory.layers, "two gathered layers: one computes, the next is prefetched" if again
         else "all layers, gathered until backward"),
        (memory.table, f"embedding {'or' if again else 'and'} head, gathered: {tables} × {cfg.model.dtype}"),
        (memory.activations, f"activations of one row: {row:,} tokens × {size(memory.activations / row)}"),
        (memory.head, "the head op: tiles of logits, gradients of hidden states and of one slice of the head"),
        (memory.head_gradient, f"the head's gradient: {tables} × {cfg.model.dtype}"),
        (memory.layer_gradients, f"a layer's gradients in {cfg.model.dtype} and their {cfg.trainer.reduce_dtype} reduction buffer"),
        (memory.table_gradients, "the same for the head, or for the embedding at the end of backward"),
        (0.0 if memory.on_host else memory.update, "a part of the optimizer's state, on the GPU for its update" if apart
         else "a temporary of the optimizer step: one number per parameter"),
    ]  # fmt: skip
    kind = "process" if cfg.hardware.device == "cpu" else "GPU"
    alone = cfg.lora.enabled or cfg.hardware.nodes == 1
    on_host = [
        ("each", memory.loading, "while it reads its shards of the model"),
        ("each", memory.optimizer if apart else 0.0, "for the optimizer's state"),
        ("rank 0" if alone else "its hosts together", memory.published,
         f"for the copy of the weights{' of each run' if cfg.is_shared_trainer else ''} that is written beside the next step"),
        ("its host", versions_in_memory(cfg), "for versions in weight_broadcast.folder"),
    ]  # fmt: skip
    return [
        f"trainer, each {kind}: {size(memory.device)}",
        *(f"  {size(value).rjust(9)}  {what}" for value, what in parts if value),
        f"  the peak: {size(memory.states)} always, plus {size(memory.moments[peak])} when {peak}",
        *(f"  {who} also: {size(value)} of host memory {what}" for who, value, what in on_host if value),
    ]
