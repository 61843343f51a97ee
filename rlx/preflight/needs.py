"""What a run needs of the disks and the memory of its hosts, in bytes. Pure: from the estimates of `rlx.config.memory`."""

from __future__ import annotations

import math

from rlx.config.memory import engine_memory, kv_cache_bytes, trained_parameters, trainer_memory, versions_in_memory
from rlx.config.row_budget import BYTES
from rlx.config.schema import CommandConfig, Config, PlayRoot, SftRoot, TrainingRoot

SHARED_MEMORY = 2**30  # bytes in /dev/shm that NCCL, torch and vLLM use between the processes of a host
PROCESS = 2**30  # bytes of host memory that a role takes for its libraries


def needed_disk(cfg: CommandConfig) -> int:
    """Bytes that a run's versions and checkpoints take at most."""
    if not isinstance(cfg, TrainingRoot):
        return 2**30
    memory, checkpoints = trainer_memory(cfg), most_checkpoints(cfg)
    weights = trained_parameters(cfg) * BYTES[cfg.trainer.optimization_dtype]  # of adapters alone, where the model is frozen
    states = weights + memory.optimizer * cfg.trainer_ranks / cfg.trainer.dp_replicate
    each = cfg.publishes(1) and cfg.memory_folder is None  # else only the versions of checkpoints are files here, and the last
    # A checkpoint's version stays with it. One more than is kept is there while it is written.
    evaluated = isinstance(cfg, SftRoot) and cfg.generates_rollouts  # then a version may be there until its evaluation has read it
    versions = min(cfg.max_steps, checkpoints + (cfg.versions_kept + 1 if each or evaluated else 1))
    return int(memory.published * versions + states * checkpoints + 2**28)


def most_checkpoints(cfg: TrainingRoot) -> int:
    """The most checkpoints that are on the disk at a time, with the one that is being written."""
    ckpt, last = cfg.ckpt, cfg.max_steps
    if ckpt.interval is None or cfg.bench:
        return 1  # of a preemption
    all_of_them = -(-last // ckpt.interval)  # one is written at the end in any case
    if ckpt.keep_last is None:
        return all_of_them
    newest = min(ckpt.keep_last + 1, all_of_them)
    older = (all_of_them - newest) * ckpt.interval  # the step of the last one before these
    for_ever = 0 if ckpt.keep_interval is None else older // math.lcm(ckpt.interval, ckpt.keep_interval)
    return min(all_of_them, newest + for_ever + (ckpt.keep_best is not None))


def needed_memory(cfg: CommandConfig) -> float:
    """Bytes of host memory that the roles on one host take, about."""
    hosts, cuda = cfg.hardware.nodes, cfg.hardware.device == "cuda"
    need = 2.0 * PROCESS  # orchestrator and supervisor
    if isinstance(cfg, PlayRoot):
        engine = PROCESS + (0.0 if cuda else engine_memory(cfg).weights + kv_cache_bytes(cfg))
        need += engine * cfg.started_servers / hosts
    if isinstance(cfg, TrainingRoot) and cfg.started_trainer_ranks:
        trainer = trainer_memory(cfg)
        need += (PROCESS + trainer.host) * cfg.started_trainer_ranks / hosts + trainer.published / (1 if cfg.lora.enabled else hosts)
        need += versions_in_memory(cfg)
    return need


def needed_shared(cfg: CommandConfig) -> float:
    """Bytes of the versions of the weights in /dev/shm (`weight_broadcast.folder`)."""
    folder = cfg.memory_folder if isinstance(cfg, Config) else None
    return versions_in_memory(cfg) if isinstance(cfg, Config) and folder is not None and folder.is_relative_to("/dev/shm") else 0.0
