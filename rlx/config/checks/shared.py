"""The rules for shared trainers and their runs (docs/many_runs.md). What a run must have like its trainer is compared when it starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from rlx.config.elsewhere import in_a_pod
from rlx.config.rules import Show, rule
from rlx.config.schema import Config, TrainerConfig

OF_A_RUN = ("num_minibatches", "num_iterations", "batch_timeout", "shared")
"""Keys of `trainer` that are a run's own. All others are of the processes that train, so of the shared trainer."""
OF_A_SHARED_TRAINER = ("max_concurrent_runs", "wait_for_others", "idle_timeout")
OF_MODELS = ("micro_batch_tokens", "ac", "optimization_dtype", "reduce_dtype", "fsdp_cpu_offload", "reshard_after_forward", "dp_replicate")
"""Those that options of `model` and `hardware` set. A run may have them; the shared trainer's count."""


@rule("trainer", "lora.rank", "replay", "bench", "launcher.name", "ref.name")
def either_end(cfg: Config, of: Show) -> Iterator[str]:
    end = "trainer.shared" if cfg.trainer.shared is not None else "trainer.max_concurrent_runs" if cfg.hosts else None
    if end is None:
        return
    if cfg.trainer.shared is not None and cfg.hosts:
        yield f"a run cannot be a shared trainer and be trained by one: {of('trainer.shared')} and {of('trainer.max_concurrent_runs')}."
        return
    if not cfg.lora.on:
        yield f"the runs of a shared trainer train adapters: {of(end)} with {of('lora.rank')}. Set lora.rank=16 or so."
    if cfg.replay is not None or cfg.bench:
        key = "bench" if cfg.bench else "replay"
        yield f"{of(key)} needs a trainer of its own: {of(end)}. Leave out one of the two."
    if cfg.launcher.name != "local" or in_a_pod():
        yield (
            f"shared trainers and their runs start on one machine only: {of(end)} with {of('launcher.name')}.\n"
            "Set launcher=local, without `rlx pod`."
        )
    if cfg.ref.name is not None:
        yield f"the reference of the runs of a shared trainer is its model without adapters: {of(end)} with {of('ref.name')}. Leave it out."


@rule("trainer", "replay")
def rows_of_a_shared_trainer(cfg: Config, of: Show) -> Iterator[str]:
    if not cfg.hosts:
        return
    for name in ("cp", "tp", "ep"):
        if getattr(cfg.trainer, name) > 1:
            yield f"a shared trainer divides neither rows nor matrices: {of(f'trainer.{name}')}. Set trainer.{name}=1."
    if cfg.trainer.compile:
        yield f"layers with several adapters are not compiled: {of('trainer.compile')}. Set trainer.compile=false."


@rule("trainer", "replay")
def keys_of_a_shared_trainer_alone(cfg: Config, of: Show) -> Iterator[str]:
    own = TrainerConfig()
    if not cfg.hosts:
        for name in ("wait_for_others", "idle_timeout"):
            if getattr(cfg.trainer, name) != getattr(own, name):
                yield f"{of(f'trainer.{name}')} is of a shared trainer. Set trainer.max_concurrent_runs, or leave it out."
    if cfg.trainer.shared is not None:
        changed = [field.name for field in fields(own) if getattr(cfg.trainer, field.name) != getattr(own, field.name)]
        theirs = [of(f"trainer.{name}") for name in changed if name not in (*OF_A_RUN, *OF_MODELS, *OF_A_SHARED_TRAINER)]
        if theirs:
            yield f"this run has no trainer of its own to be told {', '.join(theirs)}. Leave it out, and start the shared trainer with it."
