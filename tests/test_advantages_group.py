"""Advantages against plain Python loops."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlx.advantages.group import group_mean, group_norm, leave_one_out, none

GROUPS = [
    [0.0, 1.0],
    [1.0, 1.0],
    [0.1, 0.1, 0.1],  # a rounded mean would leave dust here
    [0.0, 0.0, 1.0, 0.5, -2.0],
    [1e-9, 0.0, 0.0],
    [1e6, 1e6 + 1, 1e6 - 1],
]


def loops(name: str, rewards: list[float]) -> list[float]:
    n = len(rewards)
    mean = math.fsum(rewards) / n
    if name == "none":
        return rewards
    if name == "group_mean":
        return [r - mean for r in rewards]
    if name == "leave_one_out":
        return [r - math.fsum(rewards[:i] + rewards[i + 1 :]) / (n - 1) for i, r in enumerate(rewards)]
    ddof = {"group_norm": 1, "group_norm_population": 0}[name]
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (n - ddof))
    return [(r - mean) / (std + 1e-6) for r in rewards]


FUNCTIONS = {
    "none": none,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "group_norm": group_norm,
    "group_norm_population": lambda rewards, lengths: group_norm(rewards, lengths, ddof=0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_advantages_equal_plain_loops(name):
    rewards = [np.array(group) for group in GROUPS]
    found = FUNCTIONS[name](rewards, [np.ones(len(group), dtype=np.int32) for group in GROUPS])
    assert [len(a) for a in found] == [len(group) for group in GROUPS]
    for advantages, group in zip(found, GROUPS, strict=True):
        np.testing.assert_allclose(advantages, loops(name, group), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "none"])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 1e7])
def test_equal_rewards_give_exact_zeros(name, reward):
    (advantages,) = FUNCTIONS[name]([np.full(7, reward)], [np.ones(7)])
    assert not advantages.any()


@pytest.mark.parametrize("function", [group_mean, group_norm, leave_one_out])
def test_a_group_of_one_is_refused(function):
    with pytest.raises(ValueError, match="compares the rollouts of a group, and this group has 1; use advantage=none"):
        function([np.array([1.0])], [np.array([3])])
