"""The sizes of `model` are those of the model that is trained: plan, row length and rules between heads follow from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlx.config.model_sizes import config_of, sizes_in
from rlx.config.rules import Describe, check_of, problem
from rlx.config.schema import CommandConfig
from rlx.config.validate import Origins, Problem


def _own(cfg: CommandConfig) -> tuple[Path | None, dict[str, Any]]:
    """The config.json of the model that is loaded, and the sizes there that differ from those of the configuration."""
    path = None if cfg.model.warm_start is not None or getattr(cfg, "bench", False) else config_of(cfg.model.name)
    there = {} if path is None else sizes_in(path)
    experts: dict[str, Any] = {"num_experts": None} if "num_parameters" in there else {}  # a dense model has none, whatever an option says
    differing = {key: size for key, size in (experts | there).items() if getattr(cfg.model, key) != size}
    differing = {key: size for key, size in differing.items() if key == "num_experts" or getattr(cfg.model, key) is not None}
    # An option may say less of the context than the model allows, and counts parameters exactly: alone these are no sign of another model.
    return path, differing if differing.keys() - {"context_length", "num_parameters", "num_experts_per_tok"} else {}


def use_own_sizes(cfg: CommandConfig, origins: Origins) -> list[str]:
    """Give the model the sizes of its config.json where those of a model option are others. Returns a note if there were any."""
    path, differing = _own(cfg)
    used = {key: size for key, size in differing.items() if f"model.{key}" in origins.of_groups or f"model.{key}" not in origins.of_key}
    for key, size in used.items():
        setattr(cfg.model, key, size)
    origins.note([f"model.{key}" for key in used], str(path))
    shown = ", ".join(f"{key} {size}" for key, size in used.items())
    return [f"the model has its own sizes, not those of the chosen model=: {shown} ({path})"] if used else []


@check_of(CommandConfig)
def sizes_of_the_model(cfg: CommandConfig, of: Describe) -> Iterator[Problem]:
    path, differing = _own(cfg)
    if differing:
        has = ", ".join(f"{key} {size}" for key, size in differing.items())
        why = f"the model has other sizes ({has} in {path}), and the plan would be that of another one"
        yield problem(why, [f"model.{key}" for key in differing], "leave these keys out, or set them to the model's own sizes", of)
