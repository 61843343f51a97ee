"""The rules for how the trainer's ranks divide the work."""

from __future__ import annotations

from collections.abc import Iterator

from rlx.config.rules import Show, rule, target_name
from rlx.config.schema import TrainingRoot


def _divisors(*numbers: int) -> str:
    return ", ".join(str(n) for n in range(1, min(numbers) + 1) if all(number % n == 0 for number in numbers))


@rule("trainer", "hardware", "inference.base_url")
def copies_of_equal_size(cfg: TrainingRoot, of: Show) -> Iterator[str]:
    ranks, copies = cfg.trainer_ranks, cfg.trainer.dp_replicate
    if ranks % copies:
        yield (
            f"{ranks} trainer processes cannot hold {of('trainer.dp_replicate')} copies of equal size. "
            f"Set trainer.dp_replicate to one of {_divisors(ranks)}, or change {of('hardware.trainer_processes')}."
        )


@rule("trainer", "hardware", "inference.base_url", "model.num_attention_heads")
def context_groups(cfg: TrainingRoot, of: Show) -> Iterator[str]:
    ranks, heads, cp = cfg.trainer_ranks, cfg.model.num_attention_heads, cfg.trainer.cp
    if ranks % cp:
        yield (
            f"{ranks} trainer processes cannot be divided into groups of {of('trainer.cp')}. "
            f"Set trainer.cp to one of {_divisors(ranks, heads)}, or change {of('hardware.trainer_processes')}."
        )
    elif heads % cp:
        yield (
            f"context parallelism divides the query heads: {of('model.num_attention_heads')} is not a multiple of {of('trainer.cp')}.\n"
            f"Set trainer.cp to one of {_divisors(ranks, heads)}."
        )


@rule("trainer.cp", "model.attention", "trainer.compile")
def pieces_of_rows(cfg: TrainingRoot, of: Show) -> Iterator[str]:
    if cfg.trainer.cp == 1:
        return
    if cfg.model.attention == "rows":
        yield (
            f"context parallelism cuts packed rows into pieces, but this computes every sequence whole: {of('trainer.cp')} with "
            f"{of('model.attention')}.\nSet trainer.cp=1, or model.attention=auto."
        )
    if cfg.trainer.compile:
        yield (
            f"the exchange of context parallelism does not compile yet: {of('trainer.cp')} with {of('trainer.compile')}.\n"
            "Set one of them to its default: trainer.cp=1, or trainer.compile=false."
        )


@rule("optim", "trainer.fsdp_cpu_offload", "hardware.device")
def muon_in_host_memory(cfg: TrainingRoot, of: Show) -> Iterator[str]:
    if target_name(cfg.optim) == "Muon" and cfg.trainer.fsdp_cpu_offload and cfg.hardware.device == "cuda":
        yield (
            f"Muon makes its steps from whole matrices on the GPU, but the shards would lie in host memory: {of('optim._target_')} with "
            f"{of('trainer.fsdp_cpu_offload')}.\nSet trainer.fsdp_cpu_offload=false, or use optim=adamw."
        )
