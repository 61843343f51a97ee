"""Help texts generated from the shipped configuration and the schema, without hydra."""

from __future__ import annotations

import textwrap
from dataclasses import fields

from rlx.config.schema import Config
from rlx.config.shipped import shipped_groups
from rlx.config.tree import type_at

MAIN_KEYS = (
    "max_steps",
    "seed",
    "max_async_level",
    "seq_len",
    "sampling.max_tokens",
    "sampling.temperature",
    "orchestrator.batch_size",
    "orchestrator.rollouts_per_example",
    "trainer.num_minibatches",
    "inference.base_url",
    "hardware.inference_replicas",
    "hardware.trainer_processes",
    "run.name",
    "run.dir",
    "dry_run",
    "clean",
)
WIDTH = 120


def groups() -> str:
    """One line per configuration group, with its options."""
    return _columns({name: ", ".join(sorted(path.stem for path in folder.glob("*.yaml"))) for name, folder in shipped_groups().items()})


def keys() -> str:
    """One line for each of the most common keys."""
    found = {}
    for key in MAIN_KEYS:
        section, _, name = key.rpartition(".")
        cls = type_at(Config, section) if section else Config
        found[key] = next(field.metadata["doc"] for field in fields(cls) if field.name == name)
    return _columns(found)


def _columns(entries: dict[str, str]) -> str:
    width = max(map(len, entries)) + 2
    indent = " " * (width + 2)
    lines = [
        textwrap.fill(text, WIDTH, initial_indent=f"  {name.ljust(width)}", subsequent_indent=indent) for name, text in entries.items()
    ]
    return "\n".join(lines)
