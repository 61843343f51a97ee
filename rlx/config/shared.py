"""What the runs of a shared trainer have in common with it, and what each sets for itself (docs/many_runs.md)."""

from __future__ import annotations

from typing import Any

from rlx.config.schema import Config

EQUAL = (
    "model.name", "model.warm_start", "model.dtype", "model.trust_remote_code", "lora.rank", "lora.target_modules",
)  # fmt: skip
"""Keys of the trainer that every run must have alike: one model and adapters of one shape."""


def value_of(cfg: Any, key: str) -> Any:
    """`value_of(cfg, "lora.rank")`."""
    for part in key.split("."):
        cfg = getattr(cfg, part)
    return cfg


def differing(host: Config, run: Config) -> list[str]:
    """Why a run cannot be trained by this shared trainer; empty if it can."""
    found = []
    for key in EQUAL:
        there, here = value_of(host, key), value_of(run, key)
        if there != here:
            found.append(f"{key} is {here} in this run and {there} in the shared trainer; it must be the same")
    tokens = host.micro_batch_tokens
    if run.seq_len > tokens:
        found.append(f"seq_len is {run.seq_len}, but a row of the shared trainer has {tokens} tokens (its trainer.micro_batch_tokens)")
    return found
