"""Advantages against plain Python loops."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from rlx.advantages.base import GroupScores
from rlx.advantages.batch import Ema, batch_norm
from rlx.advantages.group import group_mean, group_norm, leave_one_out, max_rl, none, opo
from rlx.advantages.mix import AdvantageMix
from rlx.config.presets import conf_directory

GROUPS = [
    [0.0, 1.0],
    [1.0, 1.0],
    [0.1, 0.1, 0.1],  # a rounded mean would leave a residue here
    [0.0, 0.0, 1.0, 0.5, 2.0],
    [0.0, 0.0, 0.0],
    [1e-9, 0.0, 0.0],
    [1e6, 1e6 + 1, 1e6 - 1],
]
LENGTHS = [[3, 5], [1, 9], [2, 2, 2], [7, 1, 4, 0, 12], [5, 6, 7], [1, 1, 100], [10, 20, 30]]
NEGATIVE = [[-1.0, 1.0, 0.5], [0.0, -2.0, -2.0]]


def scores(groups: list[list[float]], lengths: list[list[int]] | None = None, envs: list[str] | None = None) -> GroupScores:
    return GroupScores(
        rewards=[np.array(group, dtype=np.float64) for group in groups],
        lengths=[np.array(each, dtype=np.int32) for each in lengths or [[1] * len(group) for group in groups]],
        longest_turns=[np.ones(len(group), dtype=np.int32) for group in groups],
        envs=envs or ["e"] * len(groups),
    )


def loops(name: str, rewards: list[float], lengths: list[int], batch: list[list[float]]) -> list[float]:
    n = len(rewards)
    mean = math.fsum(rewards) / n
    if name == "none":
        return rewards
    if name == "group_mean":
        return [r - mean for r in rewards]
    if name == "leave_one_out":
        return [r - math.fsum(rewards[:i] + rewards[i + 1 :]) / (n - 1) for i, r in enumerate(rewards)]
    if name == "opo":
        baseline = math.fsum(r * length for r, length in zip(rewards, lengths, strict=True)) / sum(lengths)
        return [r - baseline for r in rewards]
    if name == "max_rl":
        return [(r - mean) / mean if mean else 0.0 for r in rewards]
    if name.startswith("batch_norm"):
        values = [r - math.fsum(group) / len(group) for group in batch for r in group]
        if name == "batch_norm_rewards":
            values = [r for group in batch for r in group]
        middle = math.fsum(values) / len(values)
        return [(r - mean) / (math.sqrt(math.fsum((v - middle) ** 2 for v in values) / (len(values) - 1)) + 1e-6) for r in rewards]
    ddof = {"group_norm": 1, "group_norm_population": 0}[name]
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (n - ddof))
    return [(r - mean) / (std + 1e-6) for r in rewards]


FUNCTIONS = {
    "none": none,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "group_norm": group_norm,
    "group_norm_population": lambda groups: group_norm(groups, ddof=0),
    "opo": opo,
    "max_rl": max_rl,
    "batch_norm": batch_norm,
    "batch_norm_rewards": lambda groups: batch_norm(groups, of="rewards"),
}
RELATIVE = [name for name in FUNCTIONS if name != "none"]


def test_every_preset_is_tested():
    assert {path.stem for path in (conf_directory() / "advantage").glob("*.yaml")} - {"ema"} <= FUNCTIONS.keys()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_advantages_equal_plain_loops(name):
    for groups, lengths in ((GROUPS, LENGTHS), (NEGATIVE, [[1, 2, 3], [4, 5, 6]])):
        if groups is NEGATIVE and name == "max_rl":
            continue
        found = FUNCTIONS[name](scores(groups, lengths))
        assert [len(a) for a in found] == [len(group) for group in groups]
        for advantages, group, own in zip(found, groups, lengths, strict=True):
            assert advantages.dtype == np.float32
            np.testing.assert_allclose(advantages, loops(name, group, own, groups), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", RELATIVE)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 1e7])
def test_equal_rewards_give_exact_zeros(name, reward):
    (advantages,) = FUNCTIONS[name](scores([[reward] * 7], [[1, 2, 3, 4, 5, 6, 7]]))
    assert not advantages.any()


@pytest.mark.parametrize("name", RELATIVE)
def test_a_group_of_one_is_refused(name):
    with pytest.raises(ValueError, match="compares the rollouts of a group, but this group has 1; use advantage=none"):
        FUNCTIONS[name](scores([[1.0]]))


def test_a_negative_reward_would_turn_the_sign_of_max_rl():
    with pytest.raises(ValueError, match=r"environment e gave -1: rewards must be at least 0; use advantage=group_norm"):
        max_rl(scores([[-1.0, 0.5]]))


def test_an_unknown_scale_is_refused():
    with pytest.raises(ValueError, match=r"advantage\.of is `group`; it must be centred or rewards"):
        batch_norm(scores(GROUPS), of="group")


def test_the_moving_average_is_of_the_environment_and_of_earlier_batches():
    ema = Ema(decay=0.9)
    batch = scores([[1.0, 0.0], [1.0, 1.0], [0.5]], envs=["a", "b", "a"])
    assert [a.tolist() for a in ema(batch)] == [[1.0, 0.0], [1.0, 1.0], [0.5]]
    assert [a.tolist() for a in ema(batch)] == [[1.0, 0.0], [1.0, 1.0], [0.5]], "a call must not change the state"
    ema.update(batch)
    assert ema.baselines == {"a": pytest.approx(0.1 * 0.5), "b": pytest.approx(0.1)}
    ema.update(batch)
    expected = 0.9 * 0.05 + 0.1 * 0.5
    np.testing.assert_allclose(ema(batch)[0], [1 - expected, -expected], rtol=1e-6)
    other = Ema(decay=0.9)
    other.load_state_dict(json.loads(json.dumps(ema.state_dict())))
    assert [a.tolist() for a in other(batch)] == [a.tolist() for a in ema(batch)]


def test_each_agent_of_an_environment_has_its_own_baseline():
    """In a game of two, one wins what the other loses: a common average would be the mean of both."""
    batch = replace(scores([[1.0, 1.0], [-1.0, -1.0], [0.5]], envs=["game", "game", "alone"]), agents=["x", "o", None])
    ema = Ema(decay=0.5)
    ema.update(batch)
    assert ema.baselines == {"game/x": 0.5, "game/o": -0.5, "alone": 0.25}
    assert [a.tolist() for a in ema(batch)] == [[0.5, 0.5], [-0.5, -0.5], [0.25]]


def test_each_environment_may_have_its_own_advantage_as_if_its_groups_were_the_batch():
    batch = scores([[0.0, 1.0], [1.0, 3.0], [0.0, 4.0], [5.0, 5.0]], envs=["a", "b", "a", "b"])
    mix = AdvantageMix([batch_norm, group_mean, Ema(decay=0.0)], {"a": 0, "b": 1, "c": 2})
    own = batch_norm(scores([[0.0, 1.0], [0.0, 4.0]]))
    found = mix(batch)
    assert [a.tolist() for a in found] == [own[0].tolist(), [-1.0, 1.0], own[1].tolist(), [0.0, 0.0]]
    mix.update(batch)
    assert mix.state_dict() == {"2": {"baselines": {}}}, "its environment is not in this batch"
    mix.update(scores([[2.0]], envs=["c"]))
    again = AdvantageMix([batch_norm, group_mean, Ema(decay=0.0)], {"a": 0, "b": 1, "c": 2})
    again.load_state_dict(mix.state_dict())
    assert again(scores([[2.0]], envs=["c"]))[0].tolist() == [0.0]
    assert AdvantageMix([group_mean], {}).state_dict() is None


@pytest.mark.parametrize("function", [group_mean, group_norm, leave_one_out, opo, max_rl])
@pytest.mark.parametrize("rewards", [[0.1 + 0.2, 0.3, 0.3, 0.3], [0.7, 0.1 * 7, 0.7, 1.4 / 2], [1e6, 1e6 + 1e-9, 1e6, 1e6]])
def test_rewards_that_are_equal_up_to_rounding_train_nothing(function, rewards: list[float]) -> None:
    lengths = [np.array([1, 2, 3, 4])]
    scores = GroupScores(rewards=[np.array(rewards, dtype=np.float64)], lengths=lengths, longest_turns=lengths, envs=["a"])
    assert not np.any(function(scores)[0])
    close = GroupScores(rewards=[np.array([1.0, 1.0, 1.0, 1.001])], lengths=lengths, longest_turns=lengths, envs=["a"])
    assert np.any(function(close)[0])
