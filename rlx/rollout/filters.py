"""Decides which finished groups are not worth training on. Pure functions; the collector replaces the groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rlx.config.schema import DifficultyFilter
from rlx.rollout.eval_stats import at_least
from rlx.types import Rollout


def reason_to_drop(
    rollouts: Sequence[Rollout], config: DifficultyFilter, advantages: Callable[[Sequence[Rollout]], Sequence[np.ndarray]]
) -> str | None:
    """The config key of the first rule that the group breaks, or None. The rules use the environment's rewards, before shaping.

    `advantages` computes the advantages of this group alone, of each part that is compared; only `zero_advantage` calls it.
    """
    rewards = np.array([rollout.reward for rollout in rollouts], dtype=np.float64)
    if config.min_reward is not None and not at_least(rewards.mean(), config.min_reward):
        return "min_reward"
    if config.max_reward is not None and not at_least(config.max_reward, rewards.mean()):
        return "max_reward"
    if config.min_reward_variance is not None and rewards.var() < config.min_reward_variance:
        return "min_reward_variance"
    if config.zero_advantage and not any(map(np.any, advantages(rollouts))):
        return "zero_advantage"
    return None
