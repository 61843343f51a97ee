"""Learning-rate schedule, gradient clipping, and the refusal of gradients that are not finite.

The optimizer itself is any `torch.optim` class, named by `_target_` in the configuration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rlx.config.schema import SchedulerConfig
from rlx.parallel.mesh import Mesh


class NotFiniteError(RuntimeError):
    """The loss or the gradient is NaN or infinite; training cannot continue."""


def learning_rate(update: int, peak: float, schedule: SchedulerConfig, total: int) -> float:
    """Learning rate of optimizer step `update` (0, 1, … total-1).

    Linear warm-up reaches `peak` at step `warmup_steps`-1. Then the rate is constant, or decays (`linear` or `cosine`) to `min_lr` over
    the last `decay_steps` steps (None: all after warm-up). Raises ValueError for an unknown type.
    """
    if schedule.type not in ("constant", "linear", "cosine"):
        raise ValueError(f"scheduler.type is `{schedule.type}`; it must be constant, linear or cosine")
    if update < schedule.warmup_steps:
        return peak * (update + 1) / schedule.warmup_steps
    if schedule.type == "constant":
        return peak
    after_warmup = max(total - schedule.warmup_steps, 1)
    decay = after_warmup if schedule.decay_steps is None else min(schedule.decay_steps, after_warmup)
    progress = min(max((update + 1 - (total - decay)) / decay, 0.0), 1.0)
    left = 1 - progress if schedule.type == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return schedule.min_lr + (peak - schedule.min_lr) * left


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Set every group's rate to its initial rate times `factor`. Returns the first group's rate."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
        group["lr"] = group["initial_lr"] * factor
    return optimizer.param_groups[0]["lr"]


def gradient_norm(parameters: Iterable[torch.nn.Parameter]) -> Tensor:
    """Global 2-norm of all gradients over all shards; 0 without gradients."""
    norms = []
    for part in by_mesh(p for p in parameters if p.grad is not None):
        norm: Any = torch.nn.utils.get_total_norm([p.grad for p in part if p.grad is not None])
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def by_mesh(parameters: Iterable[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Parameters that are sharded over the same ranks. torch's operations on lists of tensors need that."""
    parts: dict[Any, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        parts.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(parts.values())


def clip_gradients(parameters: list[torch.nn.Parameter], max_norm: float | None, where: str, mesh: Mesh) -> float:
    """Scale gradients down to `max_norm` (None: never) and return their norm before. Raises NotFiniteError that names `where`.

    All ranks use rank 0's norm: sums in another order, on copies of the shards, could clip otherwise, or refuse alone.
    """
    norm = gradient_norm(parameters)
    mesh.broadcast(norm)
    value = float(norm)
    if not math.isfinite(value):
        raise NotFiniteError(f"{where}: the gradient norm is {value}; lower optim.lr or set optim.max_norm, and look at the last metrics")
    if max_norm is not None and value > max_norm:
        for part in by_mesh(parameters):
            torch.nn.utils.clip_grads_with_norm_(part, max_norm, norm)
    return value
