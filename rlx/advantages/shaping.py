"""Rewards changed by length before advantages are computed. What is reported as the reward is never shaped. numpy alone.

The length of a rollout is here that of its longest turn: L_max is `sampling.max_tokens`, the most new tokens of one turn. So a rollout of
four short answers is not long, and one answer of full length is, whatever comes before or behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rlx.advantages.base import GroupScores
from rlx.config.schema import RewardConfig

CACHE_SHARE = 4096 / 20480  # of the longest answer, in DAPO's setting


def shape(groups: GroupScores, config: RewardConfig, max_tokens: Mapping[str, int]) -> GroupScores:
    """The groups with `soft_overlong` and `length_penalty` applied; `max_tokens` is L_max by environment."""
    if not config.soft_overlong and not config.length_penalty:
        return groups
    shaped = []
    for rewards, lengths, env in zip(groups.rewards, groups.longest_turns, groups.envs, strict=True):
        values = np.asarray(rewards, dtype=np.float64)
        if config.length_penalty:
            values = values - length_penalty(rewards, lengths, weight=config.length_penalty, longest=max_tokens[env])
        if config.soft_overlong:
            cache = config.overlong_cache or CACHE_SHARE * max_tokens[env]
            values = values + soft_overlong(lengths, longest=max_tokens[env], cache=cache)
        shaped.append(values)
    return replace(groups, rewards=shaped)


def soft_overlong(lengths: NDArray, *, longest: float, cache: float) -> NDArray[np.float64]:
    """[G] what is added: 0 up to longest − cache tokens, then linear to −1 at `longest` and beyond (DAPO, arXiv 2503.14476 eq. 13)."""
    return np.clip(((longest - cache) - np.asarray(lengths, dtype=np.float64)) / cache, -1.0, 0.0)


def length_penalty(rewards: NDArray, lengths: NDArray, *, weight: float, longest: float) -> NDArray[np.float64]:
    """[G] what is taken off: weight × lengths / longest × share of the group's rollouts with a reward above 0.

    So brevity counts where the prompt is solved anyway, and not at all where nobody solves it.
    """
    solved = float(np.mean(np.asarray(rewards) > 0))
    return weight * solved * np.asarray(lengths, dtype=np.float64) / longest
