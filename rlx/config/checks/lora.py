"""The rules for adapters (`lora`). Whether the model has the layers that `lora.target_modules` names is seen when it is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from rlx.config.rules import Show, rule
from rlx.config.schema import CommandConfig, LoraConfig, PlayRoot, TrainingRoot

ALL = "all-linear"
TABLES = ("lm_head", "embed_tokens", "embed_in", "embed_out", "wte")
"""Usual names of a model's input and output embeddings."""


@rule("lora")
def without_a_rank(cfg: CommandConfig, of: Show) -> Iterator[str]:
    # The file of a model or an experiment may say what adapters would get. Whoever types a key wants adapters, also with its default:
    # lora.alpha=32 is another value than that of the model's file.
    typed = [f.name for f in fields(LoraConfig) if f.name != "rank" and of.typed(f"lora.{f.name}")]
    if not cfg.lora.on and typed:
        yield (
            f"there are no adapters for {', '.join(of(f'lora.{name}') for name in typed)}: {of('lora.rank')}.\n"
            "Set lora.rank=16 or so, or leave them out."
        )


@rule("lora")
def dropout_of_everything(cfg: CommandConfig, of: Show) -> Iterator[str]:
    if cfg.lora.on and cfg.lora.dropout >= 1:
        yield f"adapters would get no input at all: {of('lora.dropout')}. It must be below 1; 0 is off."


@rule("lora")
def target_modules(cfg: CommandConfig, of: Show) -> Iterator[str]:
    wanted = cfg.lora.target_modules
    if not cfg.lora.on:
        return
    if not wanted:
        yield f"no layer would get an adapter: {of('lora.target_modules')}. Name some, like [q_proj,v_proj], or use [{ALL}]."
    if ALL in wanted and len(wanted) > 1:
        yield f"`{ALL}` already names every linear layer: {of('lora.target_modules')}. Use it alone, or name the layers."
    if tables := [name for name in wanted if name.rpartition(".")[2] in TABLES]:
        yield (
            f"embeddings and the head get no adapters, because many models tie the two: {of('lora.target_modules')}.\n"
            f"Remove {', '.join(tables)}."
        )


@rule("lora", "model.dtype", "hardware.device", "inference.base_url")
def served_on_a_gpu(cfg: PlayRoot, of: Show) -> Iterator[str]:
    if cfg.lora.on and cfg.plays and not cfg.inference.base_url and (cfg.hardware.device, cfg.model.dtype) == ("cuda", "float32"):
        yield (
            f"on a GPU, vLLM serves adapters of models in 16 bits only: {of('lora.rank')} with {of('model.dtype')} and "
            f"{of('hardware.device')}.\nSet model.dtype=bfloat16."
        )


@rule("lora", "ref")
def reference_of_adapters(cfg: TrainingRoot, of: Show) -> Iterator[str]:
    if cfg.lora.on and cfg.ref.sync_interval is not None:
        yield (
            f"with adapters the reference is the model without them, which does not follow the policy: {of('lora.rank')} with "
            f"{of('ref.sync_interval')}.\nSet ref.sync_interval=null, or lora.rank=null to train the whole model."
        )
