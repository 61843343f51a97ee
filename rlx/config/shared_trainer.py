"""What the runs of a shared trainer have in common with it, and what each sets for itself (docs/lora.md)."""

from __future__ import annotations

from operator import attrgetter

from rlx.config.schema import Config

EQUAL = (
    "model.name", "model.warm_start", "model.dtype", "model.trust_remote_code", "lora.rank", "lora.target_modules",
)  # fmt: skip
"""Keys of the trainer that every run must have alike: one model and adapters of one shape."""


def differing(host: Config, run: Config) -> list[str]:
    """Why a run cannot be trained by this shared trainer; empty if it can."""
    found = []
    for key in EQUAL:
        there, here = attrgetter(key)(host), attrgetter(key)(run)
        if there != here:
            found.append(f"{key} is {here} in this run and {there} in the shared trainer; it must be the same")
    tokens = host.micro_batch_tokens
    if run.seq_len > tokens:
        found.append(f"seq_len is {run.seq_len}, but a row of the shared trainer has {tokens} tokens (its trainer.micro_batch_tokens)")
    return found
