"""What is left out: groups by their rewards, rollouts of synthesized data by what they say."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
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
from rlx.config.schema_synthesize import SelectionConfig
from rlx.rollout.batch import scores_of
from rlx.rollout.collector import Collector
from rlx.rollout.eval_results import Outcome, Usage
from rlx.rollout.failures import RolloutsFailed
from rlx.rollout.filters import reason_to_drop
from rlx.rollout.record import read_rollouts
from rlx.rollout.rejection_sampling import (
    CAUSES,
    DUPLICATE,
    EMPTY,
    FAILED,
    FEW,
    TRUNCATED,
    Candidate,
    Transcript,
    content_hash,
    select,
)
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


async def test_a_policy_that_never_contrasts_gives_smaller_batches_instead_of_sampling_for_ever() -> None:
    env = Scored(lambda task, member: float(task.index == 2 and member == 0))
    groups = filtering(env, max_rounds=3)

    batch = await groups.collect()
    assert indices(batch) == [2]
    assert len(groups.filtered) == 3 * 4 + 2, "the limit, plus the groups in flight when it was reached"
    env.version = 1
    groups.set_version(1)
    assert await groups.collect() == []
    assert {rollouts[0].task.index for _, rollouts in groups.filtered}.isdisjoint(range(15)), "every batch counts from 0"
    await groups.close()


async def test_oversampling_has_the_replacements_in_flight_and_nothing_old_is_trained_on() -> None:
    env = Scored(lambda task, member: float(member) if task.index % 4 else 1.0, behave=lambda *_: 0.02)  # long enough for all to begin
    groups = filtering(env, oversampling_factor=1.5)

    for step in range(4):
        started = len(env.started)
        batch = await groups.collect()
        assert len(batch) == 4
        assert (len(env.started) - started) // 2 <= 6 + len(groups.filtered)
        assert min(int(turn.versions.min()) for rollouts in batch for one in rollouts for turn in turns_of(one)) == step
        env.version = step + 1
        groups.set_version(step + 1)
    await groups.close()
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
    from rlx.rollout.groups import RolloutCounters, play_group
    from rlx.rollout.task_sampler import TaskSampler

    class Game(FakeEnv):
        """Each episode has a proposer and three solvers of its problem; the second proposer's problem has one."""

        async def rollout(self, task: Any, member: int, attempt: int) -> Any:
            one = replace(
                await super().rollout(task, member, attempt), agent="proposer", baseline_key="proposer-topic", reward=float(member)
            )
            solvers = [
                replace(one, agent="solver", baseline_key=f"solver-{member}", reward=10.0 * n) for n in range(3 if member == 0 else 1)
            ]
            return replace(one, siblings=tuple(solvers))

    env = Game()
    task = TaskSampler({"e": env}, {"e": 1.0}, 0).next()  # type: ignore[dict-item]
    rollouts = run(lambda: play_group(env, task, 2, 0, RolloutCounters()))
    assert [(one.member, one.episode_index, one.siblings) for one in rollouts] == [(n, int(n > 3), ()) for n in range(6)]
    (group,) = make_groups([rollouts], scores_of([rollouts]), AdvantageMix([group_mean], {}))
    agents = [one.agent for one in group.rollouts]
    assert agents == ["proposer", *["solver"] * 3, "proposer", "solver"]
    assert group.advantages.tolist() == [-0.5, -10.0, 0.0, 10.0, 0.5, 0.0]


QUESTION = [{"role": "user", "content": "2+2?"}]


def candidate(index: int = 0, member: int = 0, reward: float = 1.0, text: str | None = None, *, failed: bool = False, **facts) -> Candidate:
    """`transcripts`, and fields of the rollout."""
    answer = {"role": "assistant", "content": f"answer {index}-{member}" if text is None else text}
    said = facts.pop("transcripts", (Transcript(prompt=QUESTION, completion=[answer]),))
    fields = {
        "env": "sums",
        "example_id": index,
        "version": 0,
        "weights": None,
        "versions": [],
        "prompt": "",
        "completion": "",
        "answer": "",
        "info": {},
        "rewards": {},
        "metrics": {},
        "error": None,
        "timing": {},
        "status": "ok",
        "is_truncated": False,
        "stop_condition": "stop",
        "token_usage": Usage(),
    }
    return Candidate(Outcome(**{**fields, **facts}, place=index, rollout=member, reward=reward, is_completed=not failed), said)


def call(arguments: str, call_id: str = "a") -> list[dict]:
    calls = [{"type": "function", "id": call_id, "function": {"name": "add", "arguments": arguments}}]
    return [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": call_id, "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]


def members(candidates: list[Candidate]) -> list[tuple[int, int]]:
    return [(c.rollout.place, c.rollout.rollout) for c in candidates]


def random_rollouts(state: random.Random) -> list[Candidate]:
    """Rollouts of two environments with few different texts and rewards, so that every rule has work."""
    return [
        candidate(
            index,
            member,
            state.choice([0.0, 0.25, 0.5, 1.0]),
            state.choice(["a", "b", " a", "c\n"]),
            env=env,
            failed=state.random() < 0.1,
            is_truncated=state.random() < 0.1,
        )
        for env in ("sums", "words")
        for index in range(state.randint(1, 4))
        for member in range(state.randint(1, 6))
    ]


def test_each_rule_drops_and_counts_its_own():
    rollouts = [
        candidate(member=0, failed=True, reward=0),
        candidate(member=1, is_truncated=True),
        candidate(member=2, transcripts=()),
        candidate(member=3, reward=0.4),
        candidate(member=4, reward=2.0),
        candidate(member=5, text="same"),
        candidate(member=6, text="same"),
        candidate(member=7),
    ]
    keys = SelectionConfig(min_reward=0.5, max_reward=1.0, per_example=1)
    kept, dropped = select(rollouts, keys, 0)
    assert members(kept) == [(0, 5)]
    assert dropped == dict.fromkeys(CAUSES[:-1], 1)


def test_a_cut_answer_is_dropped_although_the_environment_does_not_call_the_rollout_truncated():
    cut = Transcript(prompt=QUESTION, completion=[{"role": "assistant", "content": "It i"}], truncated=True)
    assert select([candidate(transcripts=(cut,))], SelectionConfig(), 0)[1] == {TRUNCATED: 1}
    assert select([candidate(transcripts=(cut,))], SelectionConfig(drop_truncated=False), 0)[1] == {}


def test_failed_rollouts_are_kept_on_request_with_what_they_said():
    silent = candidate(1, failed=True, reward=0, transcripts=())
    found = select([candidate(failed=True, reward=0), silent], SelectionConfig(drop_failed=False), 0)
    assert members(found[0]) == [(0, 0)]
    assert found[1] == {EMPTY: 1}


def test_a_rollout_with_an_answer_that_says_nothing_is_left_out() -> None:
    think = [{"role": "assistant", "content": "", "reasoning_content": "so"}]
    later = [*call('{"a": 1}'), {"role": "assistant", "content": " \n"}]
    texts = [Transcript(prompt=QUESTION, completion=each) for each in (think, later, " ", "4")]
    found = select(
        [candidate(0, 0, text=" "), *(candidate(0, n, transcripts=(text,)) for n, text in enumerate(texts, 1))], SelectionConfig(), 0
    )
    assert [one.rollout.rollout for one in found[0]] == [1, 4]
    assert found[1] == {EMPTY: 3}
    assert select([candidate(failed=True)], SelectionConfig(), 0)[1] == {FAILED: 1}


def test_what_another_rule_drops_makes_no_duplicate():
    lonely = [candidate(0, 0, text="same"), candidate(1, 0, text="same"), candidate(1, 1, text="other")]
    found = select(lonely, SelectionConfig(duplicates="all", per_example=2, require_all=True), 0)
    assert members(found[0]) == [(1, 0), (1, 1)], "example 0 has too few"


def test_duplicates_of_other_examples_are_dropped_only_on_request():
    rollouts = [candidate(0, text="x"), candidate(1, text="x")]
    assert members(select(rollouts, SelectionConfig(duplicates="example"), 0)[0]) == [(0, 0), (1, 0)]
    found = select(rollouts, SelectionConfig(duplicates="all"), 0)
    assert members(found[0]) == [(0, 0)]
    assert found[1] == {DUPLICATE: 1}


def test_the_same_answer_to_another_question_is_no_duplicate():
    other = Transcript(prompt=[{"role": "user", "content": "1+3?"}], completion=[{"role": "assistant", "content": "4"}])
    rollouts = [candidate(0, text="4"), candidate(1, transcripts=(other,))]
    assert len(select(rollouts, SelectionConfig(duplicates="all"), 0)[0]) == 2


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (call('{"x": 2, "y": 2}', "a"), call('{"y":2,"x":2}', "b"), True),  # order, white space and ids of calls say nothing
        (call('{"x": 2, "y": 2}'), call('{"x": 2, "y": 3}'), False),
        ([{"role": "assistant", "content": "é  é"}], [{"role": "assistant", "content": "é\ne\u0301\n"}], True),
        ([{"role": "assistant", "content": "Paris"}], [{"role": "assistant", "content": "paris"}], False),
        ([{"role": "assistant", "content": "4"}], [{"role": "assistant", "content": "4", "reasoning_content": "2+2"}], False),
    ],
)
def test_what_says_the_same(one: list[dict], other: list[dict], equal: bool):
    sayings = [content_hash([Transcript(prompt=QUESTION, completion=said)]) for said in (one, other)]
    assert (sayings[0] == sayings[1]) is equal


def test_other_tools_are_another_saying():
    said = Transcript(prompt=QUESTION, completion=[{"role": "assistant", "content": "4"}])
    tool = {"type": "function", "function": {"name": "add"}}
    assert content_hash([said]) != content_hash([replace(said, tools=(tool,))])


@pytest.mark.parametrize("seed", range(40))
def test_the_choice_follows_the_keys_whatever_the_order_of_finishing(seed: int):
    state = random.Random(seed)
    rollouts = random_rollouts(state)
    keys = SelectionConfig(
        drop_failed=state.random() < 0.7,
        drop_truncated=state.random() < 0.7,
        min_reward=state.choice([None, 0.25, 0.5]),
        max_reward=state.choice([None, 0.5]),
        select_by=state.choice(["first", "best", "random"]),
        duplicates=state.choice(["example", "all", "keep"]),
        per_example=state.choice([None, 1, 2, 3]),
        require_all=state.random() < 0.5,
    )
    found = select(rollouts, keys, seed)
    assert select(state.sample(rollouts, len(rollouts)), keys, seed) == found
    assert len(found[0]) + sum(found[1].values()) == len(rollouts)
    assert found[0] == sorted(found[0], key=lambda c: c.rollout.key)
    for one in found[0]:
        assert not (not one.rollout.is_completed and keys.drop_failed)
        assert not (one.rollout.is_truncated and keys.drop_truncated)
        assert (keys.min_reward or 0) <= one.rollout.reward <= (1 if keys.max_reward is None else keys.max_reward)

    kept_of, all_of = defaultdict(list), defaultdict(list)
    for one in found[0]:
        kept_of[one.rollout.key[:2]].append(one)
    for one in rollouts:
        all_of[one.rollout.key[:2]].append(one)
    texts = {key: [one.transcripts[0].completion[0]["content"].strip() for one in kept] for key, kept in kept_of.items()}
    if keys.duplicates != "keep":
        assert all(len(set(said)) == len(said) for said in texts.values())
    if keys.duplicates == "all":  # all have the same question
        assert max(Counter(text for said in texts.values() for text in said).values(), default=0) <= 1
    for key, kept in kept_of.items():
        if keys.per_example is not None:
            assert len(kept) <= keys.per_example
            assert len(kept) == keys.per_example or not keys.require_all
        if keys.select_by == "best" and keys.duplicates == "keep" and keys.max_reward is None:
            played = [one.rollout for one in all_of[key]]
            fine = [o for o in played if (o.is_completed or not keys.drop_failed) and not (o.is_truncated and keys.drop_truncated)]
            best = sorted((o.reward for o in fine), reverse=True)[: len(kept)]
            assert sorted((o.rollout.reward for o in kept), reverse=True) == best
    if not keys.require_all:
        assert FEW not in found[1]


def test_random_preference_follows_from_the_seed():
    rollouts = [candidate(index, member) for index in range(20) for member in range(8)]
    keys = SelectionConfig(select_by="random", per_example=1)
    one, again, other = (members(select(rollouts, keys, seed)[0]) for seed in (1, 1, 2))
    assert one == again != other
    assert len({member for _, member in one}) > 3
