"""Advantages with a scale or baseline from more than one group."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.advantages.base import Advantages, GroupScores
from rlx.advantages.group import centred
from rlx.config.loss_traits import declares


@declares(compares_group=True, std_over="batch", ranges={"ddof": "at least 0", "eps": "above 0"})
def batch_norm(groups: GroupScores, *, of: str = "centred", ddof: int = 1, eps: float = 1e-6) -> Advantages:
    """A_i = (R_i − mean of its group) / (std over the batch + eps) (REINFORCE++-baseline, arXiv 2501.03262; LitePPO, arXiv 2508.08221).

    `of` selects the standard deviation: of the batch's `centred` rewards (REINFORCE++-baseline) or of its `rewards` (LitePPO).
    Raises ValueError for any other value.
    """
    if of not in ("centred", "rewards"):
        raise ValueError(f"advantage.of is `{of}`; it must be centred or rewards")
    own = [centred(rewards, "batch_norm") for rewards in groups.rewards]
    values = np.concatenate(own if of == "centred" else [np.asarray(rewards, dtype=np.float64) for rewards in groups.rewards])
    scale = np.std(values, ddof=ddof) + eps
    return [(advantages / scale).astype(np.float32) for advantages in own]


@declares(ranges={"decay": "at least 0 and below 1"})
class Ema:
    """A_i = R_i − b, with b a moving average of rewards by environment and agent (role-conditioned advantage of SPIRAL, arXiv 2506.24119).

    b starts at 0 and is updated once per batch, after use: b ← decay · b + (1 − decay) · mean reward in the batch. An environment that
    trains several agents has a b for each: in a game of two, what one wins the other loses, and a common average would say nothing.
    """

    def __init__(self, *, decay: float = 0.95) -> None:
        self.decay = decay
        self.baselines: dict[str, float] = {}

    def __call__(self, groups: GroupScores) -> Advantages:
        return [
            (np.asarray(rewards, dtype=np.float64) - self.baselines.get(env, 0.0)).astype(np.float32)
            for rewards, env in zip(groups.rewards, groups.roles, strict=True)
        ]

    def update(self, groups: GroupScores) -> None:
        """Move the baseline of every environment and agent in the batch towards its mean reward."""
        for env in sorted(set(groups.roles)):
            rewards = np.concatenate([r for r, name in zip(groups.rewards, groups.roles, strict=True) if name == env])
            mean = float(np.mean(rewards, dtype=np.float64))
            self.baselines[env] = self.decay * self.baselines.get(env, 0.0) + (1 - self.decay) * mean

    def state_dict(self) -> dict[str, Any]:
        """The baselines by environment, or `environment/agent`."""
        return {"baselines": dict(self.baselines)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.baselines = {str(name): float(value) for name, value in state["baselines"].items()}
