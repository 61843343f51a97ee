"""What a configuration may do, but is seldom meant to: said before the start, and never an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlx.config.checks.run import is_path
from rlx.config.schema import CommandConfig, Config, TrainingRoot
from rlx.config.tree import Origins

SIZES = {  # key of `model` -> its name in the config.json of most families
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
}


def notes_of(cfg: Any, origins: Origins) -> Iterator[str]:
    """The notes on a checked configuration of any root."""
    if isinstance(cfg, TrainingRoot) and not cfg.bench and not cfg.hosts:  # a shared trainer's runs have their own schedules
        yield from _warm_up(cfg, origins)
    if isinstance(cfg, CommandConfig):
        yield from _sizes_of_the_folder(cfg, origins)
    if isinstance(cfg, Config) and cfg.plays and cfg.model.strips_thinking and cfg.keeps_thinking and cfg.chat.thinking is None:
        yield (
            "in training later turns see the model's earlier reasoning, which its chat template drops "
            f"({origins.show('orchestrator.trajectory_strategy', cfg.orchestrator.trajectory_strategy)}); evaluations and other "
            "servers show what the template shows. chat.thinking=template trains as they play, chat.thinking=keep evaluates as in training"
        )


def _warm_up(cfg: TrainingRoot, origins: Origins) -> Iterator[str]:
    warm_up, total = cfg.scheduler.warmup_steps, cfg.max_steps * cfg.num_updates
    if warm_up > total:
        steps = f"{origins.show('max_steps', cfg.max_steps)}" + (f", {cfg.num_updates} optimizer steps each" if cfg.num_updates > 1 else "")
        lr = cfg.optim.get("lr")
        reached = f": it ends at {lr * total / warm_up:.3g}" if isinstance(lr, int | float) else ""
        yield (
            f"the warm-up is longer than the run, so the learning rate never reaches {origins.show('optim.lr', lr)}{reached}. "
            f"{origins.show('scheduler.warmup_steps', warm_up)}; {steps}"
        )


def _sizes_of_the_folder(cfg: CommandConfig, origins: Origins) -> Iterator[str]:
    model = cfg.model
    if model.prepared or not is_path(model.name):
        return
    try:
        made = json.loads((Path(model.name).expanduser() / "config.json").read_text())
    except (OSError, ValueError, RuntimeError):  # loading the model says what is wrong with it
        return
    made = made if isinstance(made, dict) else {}
    made = inner if isinstance(inner := made.get("text_config"), dict) else made  # the inner one is of a model that sees, too
    sizes = {key: made[name] for key, name in SIZES.items() if isinstance(made.get(name), int)}
    other = {key: size for key, size in sizes.items() if getattr(model, key) not in (None, size)}
    if other:
        shown = "; ".join(
            f"{origins.show(f'model.{key}', getattr(model, key))}, but {SIZES[key]}={size} in config.json" for key, size in other.items()
        )
        yield (
            f"memory and heads are planned for a model of other sizes than that in {origins.show('model.name', model.name)}: {shown}. "
            f"Choose the option of model= that describes it, or set {' '.join(f'model.{key}={size}' for key, size in other.items())} "
            "and model.num_parameters"
        )
