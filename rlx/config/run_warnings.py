"""What a configuration may do, but is seldom meant to: said before the start, and never an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlx.config.model_sizes import config_of, sizes_in
from rlx.config.schema import Config, TrainingRoot
from rlx.config.validate import Origins


def notes_of(cfg: Any, origins: Origins) -> Iterator[str]:
    """The notes on a checked configuration of any root."""
    if isinstance(cfg, TrainingRoot) and not cfg.bench and not cfg.is_shared_trainer:  # a shared trainer's runs have their own schedules
        steps, warm_up = cfg.max_steps * cfg.num_updates, cfg.scheduler.warmup_steps
        if warm_up > steps:
            shown = origins.show("scheduler.warmup_steps", warm_up)
            yield f"the warm-up is longer than the run's {steps} optimizer steps, so optim.lr is never reached: {shown}"
    loaded = isinstance(cfg, TrainingRoot) and "model.name" in origins.typed and cfg.model.warm_start is None
    path = config_of(cfg.model.name) if loaded else None
    if loaded and (path is None or not sizes_in(path)):
        shown = origins.show("model.name", cfg.model.name)
        why = "which is not on this machine" if path is None else f"because {path} names none that rlx knows"
        yield f"the sizes of the chosen model= were not compared with the model's own, {why}: {shown}"
    if (
        isinstance(cfg, Config)
        and cfg.generates_rollouts
        and cfg.model.template_drops_thinking
        and cfg.keeps_thinking
        and cfg.chat.thinking is None
    ):
        shown = origins.show("orchestrator.trajectory_strategy", cfg.orchestrator.trajectory_strategy)
        yield (
            f"in training later turns see the model's earlier reasoning, which its chat template drops ({shown}); evaluations and other "
            "servers show what the template shows. chat.thinking=template trains as they play, chat.thinking=keep evaluates as in training"
        )
