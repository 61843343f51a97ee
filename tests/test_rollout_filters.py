"""Groups that filters drop, count and replace; shaped rewards; rewards that are not finite."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_orchestrator_run import StandInServers, config_of, metrics, play
from test_rollout_collector import FakeEnv, collector, indices, run
from traces import turns_of

from rlx.advantages.base import GroupScores
from rlx.advantages.shaping import shape
from rlx.config.schema import DifficultyFilter, RewardConfig
from rlx.rollout.batch import scores_of
from rlx.rollout.collector import Collector
from rlx.rollout.failures import RolloutsFailed
from rlx.rollout.filters import reason_to_drop
from rlx.rollout.record import read_rollouts
from rlx.trace import Trace
from rlx.types import Rollout, Task


class Scored(FakeEnv):
    """Rewards by task and member."""

    def __init__(self, reward: Any, **keys: Any) -> None:
        super().__init__(**keys)
        self.reward = reward

    async def rollout(self, task: Task, member: int, attempt: int) -> Rollout:
        return replace(await super().rollout(task, member, attempt), reward=self.reward(task, member))


def filtering(env: Scored, **settings: Any) -> Collector:
    """With a filter that drops groups whose rewards are all equal."""
    contrast = DifficultyFilter(min_reward_variance=1e-6)
    return collector(env, left_out=lambda rollouts: reason_to_drop(rollouts, contrast, lambda _: [np.ones(1)]), **settings)


def rollouts_of(*rewards: float) -> list[Rollout]:
    task = Task(env="e", example_id=0, index=0, row={})
    return [
        Rollout(task=task, member=i, trace=Trace(), prompt="", completion="", reward=r, rewards={}, metrics={}, status="ok", stop="")
        for i, r in enumerate(rewards)
    ]


@pytest.mark.parametrize(
    ("rules", "rewards", "reason"),
    [
        ({"min_reward": 0.2}, [0.0, 0.3], "min_reward"),
        ({"min_reward": 0.2}, [0.0, 0.4], None),
        ({"max_reward": 0.8}, [1.0, 0.7], "max_reward"),
        ({"max_reward": 0.8}, [1.0, 0.6], None),
        ({"min_reward_variance": 0.05}, [0.5, 0.9], "min_reward_variance"),
        ({"min_reward_variance": 0.03}, [0.5, 0.9], None),
        ({"zero_advantage": True}, [0.5, 0.5], "zero_advantage"),
        ({"zero_advantage": True}, [0.5, 0.4], None),
        ({"min_reward": 0.2, "max_reward": 0.1}, [0.0, 0.0], "min_reward"),
        ({}, [0.0, 0.0], None),
    ],
)
def test_a_group_is_left_out_by_the_first_rule_it_breaks(rules, rewards, reason):
    config = DifficultyFilter(**rules)
    found = reason_to_drop(rollouts_of(*rewards), config, lambda group: [np.array([r.reward - group[0].reward for r in group])])
    assert found == reason
    assert config.rules == list(rules)


def test_on_policy_the_batch_is_refilled_with_the_next_examples_whatever_finishes_first() -> None:
    def reward(task: Task, member: int) -> float:
        return float(member) if task.index % 3 else 1.0  # every third task has equal rewards

    async def main(jitter: float) -> tuple[list[int], list[int]]:
        env = Scored(reward, behave=lambda task, member, attempt: jitter * ((task.index * 7 + member) % 5))
        groups = filtering(env)
        batch = await groups.collect()
        left_out = [rollouts[0].task.index for rule, rollouts in groups.filtered if rule == "min_reward_variance"]
        assert groups.tally.dropped == {}
        await groups.close()
        return indices(batch), sorted(left_out)

    assert run(lambda: main(0.0)) == run(lambda: main(0.01)) == ([1, 2, 4, 5], [0, 3])


def test_a_policy_that_never_contrasts_gives_smaller_batches_instead_of_sampling_for_ever() -> None:
    env = Scored(lambda task, member: float(task.index == 2 and member == 0))
    groups = filtering(env, max_rounds=3)

    async def main() -> None:
        batch = await groups.collect()
        assert indices(batch) == [2]
        assert len(groups.filtered) == 3 * 4 + 2, "the limit, plus the groups in flight when it was reached"
        env.version = 1
        groups.set_version(1)
        assert await groups.collect() == []
        assert {rollouts[0].task.index for _, rollouts in groups.filtered}.isdisjoint(range(15)), "every batch counts from 0"
        await groups.close()

    run(main)


def test_oversampling_has_the_replacements_in_flight_and_nothing_old_is_trained_on() -> None:
    env = Scored(lambda task, member: float(member) if task.index % 4 else 1.0, behave=lambda *_: 0.02)  # long enough for all to begin
    groups = filtering(env, oversampling_factor=1.5)

    async def main() -> None:
        for step in range(4):
            started = len(env.started)
            batch = await groups.collect()
            assert len(batch) == 4
            assert (len(env.started) - started) // 2 <= 6 + len(groups.filtered)
            assert min(int(turn.versions.min()) for rollouts in batch for one in rollouts for turn in turns_of(one)) == step
            env.version = step + 1
            groups.set_version(step + 1)
        await groups.close()

    run(main)
    assert env.most_in_flight == 12, "six groups of two in flight; a batch has four"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused_by_name(value: float) -> None:
    env = Scored(lambda task, member: value if task.index == 1 and member == 1 else float(member))
    groups = collector(env)

    async def main() -> None:
        assert indices(await groups.collect()) == [0, 2, 3, 4]
        assert groups.tally.failed == ({"reward_not_finite": 3})
        assert f"the reward of rollout 1 of group 1 is {value}; rewards must be finite" in str(groups.tally.failures[0].error)
        await groups.close()

    run(main)
    env.reward = lambda task, member: value
    with pytest.raises(RolloutsFailed, match=r"reward_not_finite: the reward of rollout \d of group \d+ is -?(nan|inf)"):
        run(collector(env).collect)


def test_lengths_change_the_rewards_that_advantages_see() -> None:
    groups = GroupScores(
        rewards=[np.array([1.0, 0.0, 1.0, 0.0]), np.array([0.0, 0.0])],
        lengths=[np.array([100, 16, 58, 20]), np.array([25, 33])],  # over all turns; max_tokens bounds each turn
        longest_turns=[np.array([10, 16, 18, 20]), np.array([25, 3])],
        envs=["a", "b"],
    )
    longest = {"a": 20, "b": 20}
    assert shape(groups, RewardConfig(), longest) is groups
    soft = shape(groups, RewardConfig(soft_overlong=True), longest).rewards
    np.testing.assert_allclose(soft[0], [1.0, 0.0, 0.5, -1.0])  # a fifth of 20 tokens: from 16 to 20
    np.testing.assert_allclose(soft[1], [-1.0, 0.0])
    soft = shape(groups, RewardConfig(soft_overlong=True, overlong_cache=10), longest).rewards
    np.testing.assert_allclose(soft[0], [1.0, -0.6, 0.2, -1.0])
    brief = shape(groups, RewardConfig(length_penalty=0.2), longest).rewards
    np.testing.assert_allclose(brief[0], [1 - 0.05, -0.08, 1 - 0.09, -0.1])  # half of the group solved it
    np.testing.assert_allclose(brief[1], [0.0, 0.0])  # nobody did


def test_the_reported_reward_is_that_of_all_rollouts_played_and_rules_are_counted(tmp_path: Path) -> None:
    config = config_of(
        orchestrator__difficulty_filter=DifficultyFilter(min_reward_variance=1e-6, max_rounds=50),
        reward=RewardConfig(length_penalty=0.5),
        max_steps=3,
    )
    paths, trainer = play(tmp_path, config, StandInServers(error=0.5))
    for step, record in enumerate(metrics(paths)):
        lines = list(read_rollouts(paths.rollouts_of(step)))
        trained = [line for line in lines if line["left_out"] is None]
        assert record["batch/rollouts"] == len(trained) == 8 * (record["batch/groups"] / 2)
        assert record["batch/zero_advantage_frac"] == 0
        assert len(lines) == 4 * (record["batch/groups"] + record["filter/min_reward_variance"])
        assert record["reward/mean"] == pytest.approx(np.mean([line["reward"] for line in lines])), "all played rollouts, unshaped"
        assert {(line["left_out"], line["advantage"]) for line in lines if line not in trained} <= {("min_reward_variance", None)}
    assert sum(record["filter/min_reward_variance"] for record in metrics(paths)) > 0
    assert len(trainer.batches) == 3


def test_a_group_of_several_agents_is_compared_agent_by_agent_and_task_by_task() -> None:
    from rlx.advantages.group import group_mean
    from rlx.advantages.mix import AdvantageMix
    from rlx.rollout.batch import make_groups
    from rlx.rollout.groups import Tally, play_group
    from rlx.rollout.task_sampler import TaskSampler

    class Game(FakeEnv):
        """Each episode has a proposer and three solvers of its problem; the second proposer's problem has one."""

        async def rollout(self, task: Any, member: int, attempt: int) -> Any:
            one = replace(await super().rollout(task, member, attempt), agent="proposer", compared="proposer-topic", reward=float(member))
            solvers = [replace(one, agent="solver", compared=f"solver-{member}", reward=10.0 * n) for n in range(3 if member == 0 else 1)]
            return replace(one, others=tuple(solvers))

    env = Game()
    task = TaskSampler({"e": env}, {"e": 1.0}, 0).next()  # type: ignore[dict-item]
    rollouts = run(lambda: play_group(env, task, 2, 0, Tally()))
    assert [(one.member, one.episode, one.others) for one in rollouts] == [(n, int(n > 3), ()) for n in range(6)]
    (group,) = make_groups([rollouts], scores_of([rollouts]), AdvantageMix([group_mean], {}))
    agents = [one.agent for one in group.rollouts]
    assert agents == ["proposer", *["solver"] * 3, "proposer", "solver"]
    assert group.advantages.tolist() == [-0.5, -10.0, 0.0, 10.0, 0.5, 0.0]
