"""The rule that the sizes of `model` are those of the model that is trained: plan, row length and rules between heads follow from them."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlx.config.rules import Show, check_of, problem
from rlx.config.schema import CommandConfig
from rlx.config.tree import Problem

SIZES = {  # key of `model` → its names in the config.json of families
    "hidden_size": ("hidden_size",),
    "num_layers": ("num_hidden_layers",),
    "num_attention_heads": ("num_attention_heads",),
    "num_key_value_heads": ("num_key_value_heads",),
    "num_experts": ("num_experts", "num_local_experts"),
    "vocab_size": ("vocab_size",),
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
        found = {key: next((made[name] for name in names if isinstance(made.get(name), int)), None) for key, names in SIZES.items()}
    except (OSError, ValueError, AttributeError):  # loading the model says what is wrong with it
        return {}
    return {key: value for key, value in found.items() if value is not None}


@check_of(CommandConfig)
def sizes_of_the_model(cfg: CommandConfig, of: Show) -> Iterator[Problem]:
    path = None if cfg.model.warm_start is not None or getattr(cfg, "bench", False) else config_of(cfg.model.name)
    if path is None:
        return
    there = _sizes(path, path.stat().st_mtime)
    differing = {key: size for key, size in there.items() if getattr(cfg.model, key) not in (size, None)}
    if differing:
        keys = [f"model.{key}" for key in differing]
        has = ", ".join(f"{key} {size}" for key, size in differing.items())
        fix = f"the option of model= that describes this model, or {' '.join(f'model.{key}={size}' for key, size in differing.items())}"
        yield problem(f"the model has other sizes ({has} in {path}), and the plan would be that of another one", keys, fix, of)
