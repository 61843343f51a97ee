"""What a configuration may do, but is seldom meant to: said before the start, and never an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlx.config.schema import TrainingRoot
from rlx.config.tree import Origins


def notes_of(cfg: Any, origins: Origins) -> Iterator[str]:
    """The notes on a checked configuration of any root."""
    if isinstance(cfg, TrainingRoot) and not cfg.bench and not cfg.hosts:  # a shared trainer's runs have their own schedules
        yield from _warm_up(cfg, origins)


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
