"""Which keys would save how much of the trainer's device memory, by the estimates of `rlx.config.memory`. Pure.

Knows only keys that leave what is learned unchanged: those that recompute, move to host memory, or make rows shorter. Fewer tokens, a
smaller model or adapters are the user's decision.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from rlx.config.memory import size, trainer_memory
from rlx.config.row_budget import WHOLE
from rlx.config.rules import target_name
from rlx.config.schema import PlayRoot, TrainingRoot

RAN_OUT = ("OutOfMemoryError", "CUDA out of memory", "CUDA error: out of memory")  # of torch's and CUDA's errors
LEAST = 0.01  # share of the peak that is worth a line


def ran_out(lines: Iterable[str]) -> bool:
    """Whether the end of a process's log says that a GPU's memory ran out."""
    return any(words in line for line in lines for words in RAN_OUT)


def savings(cfg: TrainingRoot) -> dict[str, float]:
    """Overrides, and the bytes that each alone takes from the estimated peak of a rank; the largest saving first."""
    trainer, cuda = cfg.trainer, cfg.hardware.device == "cuda"
    shorter = max(cfg.seq_len, cfg.micro_batch_tokens // 2 // WHOLE * WHOLE)
    full, instead = trainer.ac.mode == "full", " trainer.optim_cpu_offload=false" * trainer.optim_cpu_offload
    muon = target_name(cfg.optim) == "Muon"
    possible: list[tuple[str, bool, dict[str, Any]]] = [  # the override, whether it would change something, and what
        ("trainer.ac.freq=1" + " trainer.ac.mode=full" * (not full), True, {"ac": replace(trainer.ac, freq=1, mode="full")}),
        ("trainer.ac_offloading=true", cuda and trainer.ac.freq > 0, {"ac_offloading": True}),
        (f"trainer.micro_batch_tokens={shorter}", shorter < cfg.micro_batch_tokens, {"micro_batch_tokens": shorter}),
        ("trainer.reshard_after_forward=true", cfg.trainer_ranks > 1 or cfg.mixed_precision, {"reshard_after_forward": True}),
        ("trainer.optim_cpu_offload=true", cuda and not trainer.fsdp_cpu_offload, {"optim_cpu_offload": True}),
        (f"trainer.fsdp_cpu_offload=true{instead}", cuda and not muon, {"fsdp_cpu_offload": True, "optim_cpu_offload": False}),
    ]
    changed = {override: replace(trainer, **changes) for override, applies, changes in possible if applies}
    peak = trainer_memory(cfg).device
    saved = {override: peak - trainer_memory(replace(cfg, trainer=other)).device for override, other in changed.items()}
    return dict(sorted(((key, value) for key, value in saved.items() if value > LEAST * peak), key=lambda pair: -pair[1]))


def when_out_of_memory(cfg: TrainingRoot) -> str:
    """What to do when the trainer's device has no memory left, in lines."""
    memory = trainer_memory(cfg)
    moment = max(memory.moments, key=lambda name: memory.moments[name])
    return "\n".join(
        [f"the device ran out of memory; the estimate was {size(memory.device)} on each rank, at its peak when {moment}", *remedies(cfg)]
    )


def remedies(cfg: TrainingRoot) -> list[str]:
    """What takes less memory, with what it would save, in lines."""
    lines = []
    if found := savings(cfg):
        lines.append("by the estimates, each of these alone would save:")
        lines += [f"  {override}: {size(value)}" for override, value in found.items()]
    lines.append("more ranks share parameters, gradients and optimizer (hardware=); dry_run=true lists all parts of the estimate")
    if isinstance(cfg, PlayRoot) and cfg.hardware.colocate and cfg.generates_rollouts:
        lines.append(f"the engine has {cfg.inference.gpu_memory_utilization:.0%} of the same GPU: lower inference.gpu_memory_utilization")
    return lines
