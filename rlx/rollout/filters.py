"""Which finished groups are not worth training on. Pure; knows rollouts and thresholds, nothing of how groups are replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rlx.config.schema import DifficultyFilter
from rlx.types import Rollout

RULES = ("min_reward", "max_reward", "min_reward_variance", "zero_advantage")


def reason_to_drop(
    rollouts: Sequence[Rollout], config: DifficultyFilter, advantages: Callable[[Sequence[Rollout]], np.ndarray]
) -> str | None:
    """The first rule that the group breaks, by its key, or None. Rewards are those of the environment, not the shaped ones.

    `advantages` tells those of this group alone; it is asked only for `zero_advantage`.
    """
    rewards = np.array([rollout.reward for rollout in rollouts], dtype=np.float64)
    if config.min_reward is not None and rewards.mean() < config.min_reward:
        return "min_reward"
    if config.max_reward is not None and rewards.mean() > config.max_reward:
        return "max_reward"
    if config.min_reward_variance is not None and rewards.var() < config.min_reward_variance:
        return "min_reward_variance"
    if config.zero_advantage and not np.any(advantages(rollouts)):
        return "zero_advantage"
    return None


def rules_of(config: DifficultyFilter) -> list[str]:
    """The rules that are on."""
    return [rule for rule in RULES if getattr(config, rule) not in (None, False)]
