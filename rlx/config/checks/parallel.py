"""The rules for how the trainer's ranks divide the work."""

from __future__ import annotations

from collections.abc import Iterator

from rlx.config.rules import Show, rule, target_name
from rlx.config.schema import TrainingRoot


def _divisors(*numbers: int) -> str:
    return ", ".join(str(n) for n in range(1, min(numbers) + 1) if all(number % n == 0 for number in numbers))


@rule("trainer", "hardware", "inference.base_url")
def copies_of_equal_size(cfg: TrainingRoot, of: Show) -> Iterator[str]:
    if cfg.measured == "inference":  # nothing is trained
        return
    ranks, copies = cfg.trainer_ranks, cfg.trainer.dp_replicate
    if ranks % copies:
        yield (
            f"{ranks} trainer processes cannot hold {of('trainer.dp_replicate')} copies of equal size. "
            f"Set trainer.dp_replicate to one of {_divisors(ranks)}, or change {of('hardware.trainer_processes')}."
        )
        return
    for name, size in (("trainer.tp", cfg.trainer.tp), ("trainer.ep", cfg.trainer.ep)):
        if ranks // copies % size and not ranks % size:
            yield (
                f"a copy of the model has {ranks // copies} of {ranks} ranks, which {of(name)} does not divide: "
                f"{of('trainer.dp_replicate')}.\n"
                f"Set trainer.dp_replicate to one of {_divisors(ranks // size)}."
            )


@rule("trainer", "hardware", "inference.base_url", "model.num_attention_heads", "model.num_key_value_heads")
def ranks_of_a_row(cfg: TrainingRoot, of: Show) -> Iterator[str]:
    if cfg.measured == "inference":
        return
    ranks, heads, keys = cfg.trainer_ranks, cfg.model.num_attention_heads, cfg.model.num_key_value_heads
    cp, tp, together = cfg.trainer.cp, cfg.trainer.tp, cfg.trainer.ranks_of_a_row
    axes = [name for name, size in (("cp", cp), ("tp", tp)) if size > 1]
    shown = " × ".join(of(f"trainer.{name}") for name in axes)
    fix = f"Set {'trainer.cp · trainer.tp' if len(axes) > 1 else f'trainer.{axes[0]}'} to one of" if axes else ""
    if ranks % together:
        yield (
            f"{ranks} trainer processes cannot be divided into groups of {shown}. "
            f"{fix} {_divisors(ranks, heads)}, or change {of('hardware.trainer_processes')}."
        )
    elif heads % together:
        yield (
            f"the ranks of a row divide the query heads: {of('model.num_attention_heads')} is not a multiple of {shown}.\n"
            f"{fix} {_divisors(ranks, heads)}."
        )
    elif keys % tp:
        yield (
            f"tensor parallelism divides the key and value heads: {of('model.num_key_value_heads')} is not a multiple of "
            f"{of('trainer.tp')}.\nSet trainer.tp to one of {_divisors(ranks, keys)}, or use trainer.cp, which repeats them."
        )


@rule("trainer", "model.divides_heads")
def heads_that_can_be_divided(cfg: TrainingRoot, of: Show) -> Iterator[str]:
    if cfg.trainer.tp > 1 and not cfg.model.divides_heads:
        yield (
            f"transformers has no plan that divides the attention of this model's family by heads: {of('trainer.tp')} with "
            f"{of('model.divides_heads')}.\nSet trainer.tp=1, or use trainer.cp for long sequences."
        )


@rule("trainer", "hardware", "inference.base_url", "model.num_experts")
def ranks_of_experts(cfg: TrainingRoot, of: Show) -> Iterator[str]:
    ranks, experts, ep = cfg.trainer_ranks, cfg.model.num_experts, cfg.trainer.ep
    if ep == 1 or cfg.measured == "inference":
        return
    if experts is None:
        yield (
            f"expert parallelism needs a mixture of experts: {of('trainer.ep')} with {of('model.num_experts')}.\n"
            "Set trainer.ep=1, or model.num_experts to the number of experts in the model's config.json."
        )
    elif experts % ep:
        yield f"{of('model.num_experts')} is not a multiple of {of('trainer.ep')}. Set trainer.ep to one of {_divisors(ranks, experts)}."
    elif ranks % ep:
        yield (
            f"{ranks} trainer processes cannot be divided into groups of {of('trainer.ep')}. "
            f"Set trainer.ep to one of {_divisors(ranks, experts)}, or change {of('hardware.trainer_processes')}."
        )


@rule("trainer", "model.attention")
def pieces_of_rows(cfg: TrainingRoot, of: Show) -> Iterator[str]:
    axes = {"trainer.cp": cfg.trainer.cp, "trainer.tp": cfg.trainer.tp, "trainer.ep": cfg.trainer.ep}
    for name in (name for name, size in axes.items() if size > 1):
        if cfg.model.attention == "rows" and name != "trainer.ep":
            yield (
                f"packed rows are cut into pieces, but this computes every sequence whole: {of(name)} with {of('model.attention')}.\n"
                f"Set {name}=1, or model.attention=auto."
            )
        if cfg.trainer.compile:
            yield (
                f"layers that exchange tokens with other ranks are not compiled: {of(name)} with {of('trainer.compile')}.\n"
                f"Set one of them to its default: {name}=1, or trainer.compile=false."
            )


@rule("trainer.fsdp_cpu_offload", "trainer.optim_cpu_offload", "hardware.device")
def offload_from_a_gpu(cfg: TrainingRoot, of: Show) -> Iterator[str]:
    on = {"trainer.fsdp_cpu_offload": cfg.trainer.fsdp_cpu_offload, "trainer.optim_cpu_offload": cfg.trainer.optim_cpu_offload}
    for name in (name for name, offloads in on.items() if offloads and cfg.hardware.device == "cpu"):
        yield f"on a CPU everything lies in host memory already: {of(name)} with {of('hardware.device')}.\nSet {name}=false."
    if all(on.values()):
        yield (
            f"{of('trainer.fsdp_cpu_offload')} keeps the optimizer's state in host memory, too, so {of('trainer.optim_cpu_offload')} adds "
            "nothing.\nSet one of them to false. With trainer.optim_cpu_offload alone the GPU makes the updates."
        )


@rule("optim", "trainer.fsdp_cpu_offload", "hardware.device")
def muon_in_host_memory(cfg: TrainingRoot, of: Show) -> Iterator[str]:
    if target_name(cfg.optim) == "Muon" and cfg.trainer.fsdp_cpu_offload and cfg.hardware.device == "cuda":
        yield (
            f"Muon makes its steps from whole matrices on the GPU, but the shards would lie in host memory: {of('optim._target_')} with "
            f"{of('trainer.fsdp_cpu_offload')}.\nSet trainer.fsdp_cpu_offload=false, or use optim=adamw."
        )
