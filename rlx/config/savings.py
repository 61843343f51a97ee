"""Which keys would save how much of the trainer's device memory, by the estimates of `rlx.config.memory`. Pure.

Knows only keys that leave what is learned unchanged: those that recompute, move to host memory, or make rows shorter. Fewer tokens, a
smaller model or adapters are the user's decision.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rlx.config.memory import size, trainer_memory
from rlx.config.rows import WHOLE
from rlx.config.schema import PlayRoot, TrainingRoot

RAN_OUT = ("OutOfMemoryError", "CUDA out of memory", "CUDA error: out of memory")  # of torch's and CUDA's errors
LEAST = 0.01  # share of the peak that is worth a line


def ran_out(lines: Iterable[str]) -> bool:
    """Whether the end of a process's log says that a GPU's memory ran out."""
    return any(words in line for line in lines for words in RAN_OUT)


def savings(cfg: TrainingRoot) -> dict[str, float]:
    """Overrides, and the bytes that each alone takes from the estimated peak of a rank; the largest saving first."""
    trainer, cuda = cfg.trainer, cfg.hardware.device == "cuda"
    changed = {}
    if trainer.ac.freq != 1 or trainer.ac.mode != "full":
        full = " trainer.ac.mode=full" if trainer.ac.mode != "full" else ""
        changed[f"trainer.ac.freq=1{full}"] = replace(trainer, ac=replace(trainer.ac, freq=1, mode="full"))
    if cuda and trainer.ac.freq and not trainer.ac_offloading:
        changed["trainer.ac_offloading=true"] = replace(trainer, ac_offloading=True)
    shorter = max(cfg.seq_len, cfg.micro_batch_tokens // 2 // WHOLE * WHOLE)
    if shorter < cfg.micro_batch_tokens:
        changed[f"trainer.micro_batch_tokens={shorter}"] = replace(trainer, micro_batch_tokens=shorter)
    if not cfg.reshards and (cfg.trainer_ranks > 1 or cfg.mixed):
        changed["trainer.reshard_after_forward=true"] = replace(trainer, reshard_after_forward=True)
    if cuda and not trainer.optim_cpu_offload and not trainer.fsdp_cpu_offload:
        changed["trainer.optim_cpu_offload=true"] = replace(trainer, optim_cpu_offload=True)
    if cuda and not trainer.fsdp_cpu_offload and not str(cfg.optim.get("_target_", "")).endswith(".Muon"):
        instead = " trainer.optim_cpu_offload=false" if trainer.optim_cpu_offload else ""
        changed[f"trainer.fsdp_cpu_offload=true{instead}"] = replace(trainer, fsdp_cpu_offload=True, optim_cpu_offload=False)
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
    if isinstance(cfg, PlayRoot) and cfg.hardware.shared and cfg.plays:
        lines.append(f"the engine has {cfg.inference.gpu_memory_utilization:.0%} of the same GPU: lower inference.gpu_memory_utilization")
    return lines
