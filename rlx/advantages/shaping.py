"""Reward shaping by length, before advantages are computed. The reported reward is never shaped. Uses numpy only.

A rollout's length is here that of its longest turn, because L_max is `sampling.max_tokens`, which bounds one turn. A rollout of four
short answers is therefore short. A rollout with one answer of full length is long, whatever its other turns are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rlx.advantages.base import GroupScores
from rlx.config.schema import RewardConfig

CACHE_SHARE = 4096 / 20480  # of L_max, as in DAPO


def shape(groups: GroupScores, config: RewardConfig, max_tokens: Mapping[str, int]) -> GroupScores:
    """The groups with `soft_overlong` and `length_penalty` applied. `max_tokens` is L_max by environment."""
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
    """[G] to add to rewards: 0 up to longest − cache tokens, then linear to −1 at `longest` and beyond (DAPO, arXiv 2503.14476 eq. 13)."""
    return np.clip(((longest - cache) - np.asarray(lengths, dtype=np.float64)) / cache, -1.0, 0.0)


def length_penalty(rewards: NDArray, lengths: NDArray, *, weight: float, longest: float) -> NDArray[np.float64]:
    """[G] to subtract from rewards: weight × lengths / longest × share of the group's rollouts with a reward above 0.

    Brevity thus counts most for solved prompts, and not at all for unsolved ones.
    """
    solved = float(np.mean(np.asarray(rewards) > 0))
    return weight * solved * np.asarray(lengths, dtype=np.float64) / longest
