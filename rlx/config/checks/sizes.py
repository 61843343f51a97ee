"""The sizes of `model` are those of the model that is trained: plan, row length and rules between heads follow from them."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlx.config.rules import Show, check_of, problem
from rlx.config.schema import CommandConfig
from rlx.config.tree import Origins, Problem

SIZES = {  # key of `model` → its names in the config.json of families
    "hidden_size": ("hidden_size",),
    "num_layers": ("num_hidden_layers",),
    "num_attention_heads": ("num_attention_heads",),
    "num_key_value_heads": ("num_key_value_heads",),
    "num_experts": ("num_experts", "num_local_experts"),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "context_length": ("max_position_embeddings",),
}


def config_of(name: str) -> Path | None:
    """The config.json of a model: in its folder, or in the hub's cache on this machine."""
    if (found := Path(name).expanduser() / "config.json").is_file():
        return found
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    repository = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{name.replace('/', '--')}"
    cached = [path for path in (repository / "refs").glob("main") if path.is_file()]
    found = repository / "snapshots" / (cached[0].read_text().strip() if cached else "absent") / "config.json"
    return found if found.is_file() else None


@functools.lru_cache(maxsize=64)
def _sizes(path: Path, changed: float) -> dict[str, int]:
    try:
        made: Any = json.loads(path.read_text(encoding="utf-8"))
        made = made.get("text_config") or made  # the inner one is of a model that sees, too
        named = [(key, made.get(name)) for key, names in SIZES.items() for name in reversed(names)]
        found = {key: value for key, value in named if isinstance(value, int)}
    except (OSError, ValueError, AttributeError):  # loading the model says what is wrong with it
        return {}
    if isinstance(inner := made.get("intermediate_size"), int) and {"hidden_size", "num_layers", "vocab_size"} <= found.keys():
        hidden, experts = found["hidden_size"], found.get("num_experts", 1)
        heads = found.get("num_attention_heads", 1)
        width = found.get("head_dim") or hidden // heads
        attention = 2 * hidden * width * (heads + found.get("num_key_value_heads", heads))
        feed_forward = 3 * hidden * made.get("moe_intermediate_size", inner) * experts
        tables = found["vocab_size"] * hidden * (1 if made.get("tie_word_embeddings") else 2)
        found["num_parameters"] = found["num_layers"] * (attention + feed_forward) + tables
    return found


def _own(cfg: CommandConfig) -> tuple[Path | None, dict[str, int]]:
    """The config.json of the model that is loaded, and the sizes there that differ from those of the configuration."""
    path = None if cfg.model.warm_start is not None or getattr(cfg, "bench", False) else config_of(cfg.model.name)
    there = {} if path is None else _sizes(path, path.stat().st_mtime)
    differing = {key: size for key, size in there.items() if getattr(cfg.model, key) not in (size, None)}
    # An option may say less of the context than the model allows, and counts parameters exactly: alone these are no sign of another model.
    return path, differing if differing.keys() - {"context_length", "num_parameters"} else {}


def use_own_sizes(cfg: CommandConfig, origins: Origins) -> list[str]:
    """Give the model the sizes of its config.json where those of a model option are others. Returns a note if there were any."""
    path, differing = _own(cfg)
    used = {key: size for key, size in differing.items() if f"model.{key}" in origins.of_groups}
    for key, size in used.items():
        setattr(cfg.model, key, size)
    origins.note([f"model.{key}" for key in used], str(path))
    shown = ", ".join(f"{key} {size}" for key, size in used.items())
    return [f"the model has its own sizes, not those of the chosen model=: {shown} ({path})"] if used else []


@check_of(CommandConfig)
def sizes_of_the_model(cfg: CommandConfig, of: Show) -> Iterator[Problem]:
    path, differing = _own(cfg)
    if differing:
        has = ", ".join(f"{key} {size}" for key, size in differing.items())
        why = f"the model has other sizes ({has} in {path}), and the plan would be that of another one"
        yield problem(why, [f"model.{key}" for key in differing], "leave these keys out, or set them to the model's own sizes", of)
