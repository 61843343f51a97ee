"""Groups in flight: the staleness bound, replacements, failures, order. The environments are a few lines of asyncio."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from traces import trace_of, turns_of

from rlx.config.schema import BufferConfig
from rlx.rollout.collector import Collector
from rlx.rollout.failures import RolloutsFailed
from rlx.rollout.groups import GroupFailed, RolloutCounters, play_group
from rlx.trace import Turn
from rlx.types import Rollout, Task

Behaviour = Callable[[Task, int, int], Any]  # task, member, attempt -> seconds to take, or a status


class FakeEnv:
    """Plays as `behave` says. The tokens have the versions that `server.version` has when an episode begins and ends."""

    scores_groups = False
    compares = True  # with `scores_groups`: the rewards of these tasks do compare the group
    agents: Sequence[str] = ()

    def __init__(self, behave: Behaviour = lambda *_: 0.0, name: str = "e", size: int = 100) -> None:
        self.name = name
        self.rows = [{"example_id": i} for i in range(size)]
        self.behave = behave
        self.version = 0
        self.most_in_flight = self.in_flight = 0
        self.started: list[tuple[int, int, int]] = []
        self.asked: list[tuple[int, list[int], int]] = []
        self.ended: list[int] = []

    async def play(self, task: Task, members: Sequence[int], attempt: int) -> list[Rollout]:
        self.asked.append((task.index, list(members), attempt))
        played = list(await asyncio.gather(*(self.rollout(task, member, attempt) for member in members)))
        unscored = self.scores_groups and self.compares and any(one.status != "ok" for one in played)
        return [replace(one, status="cancelled") if unscored and one.status == "ok" else one for one in played]

    async def rollout(self, task: Task, member: int, attempt: int) -> Rollout:
        self.started.append((task.index, member, attempt))
        self.in_flight += 1
        self.most_in_flight = max(self.in_flight, self.most_in_flight)
        begin = self.version
        try:
            does = self.behave(task, member, attempt)
            await asyncio.sleep(does if isinstance(does, float) else 0)
        finally:
            self.in_flight -= 1
            self.ended.append(task.index)
        ids = np.zeros(2, dtype=np.int32)
        versions = np.array([begin, self.version], dtype=np.int32)
        turn = Turn(
            prompt_ids=ids[:1],
            completion_ids=ids,
            logprobs=ids.astype(np.float32),
            versions=versions,
            temperature=1.0,
            finish_reason="stop",
        )
        status = does if isinstance(does, str) else "ok"
        return Rollout(
            task=task, member=member, trace=trace_of(turn), prompt=[], completion=[], reward=1.0, rewards={}, metrics={}, status=status,
            stop=status, error=f"because {task.example_id}", timing={"total": 0.0},
        )  # fmt: skip

    async def close(self) -> None:
        pass


def config_of(
    envs: Sequence[str],
    *,
    group_size: int | dict[str, int] = 2,
    weights: dict[str, float] | None = None,
    on_timeout: str = "drop",
    buffer: BufferConfig | None = None,
    max_rounds: int = 10,
    seed: int = 0,
    **settings: Any,
) -> Any:
    """The part of a configuration that a collector reads. `settings`: others than the usual ones."""
    sizes = group_size if isinstance(group_size, dict) else dict.fromkeys(envs, group_size)
    own = {"max_error_rate": 0.5, "min_group": 2, "max_retries": 2, "oversampling_factor": 1.0}
    own |= {name: settings.pop(name) for name in own.keys() & settings.keys()}
    values = {"num_groups": 4, "max_steps": 100, "max_async_level": 0, "concurrency": settings.pop("max_concurrent", 64), **settings}
    return SimpleNamespace(
        envs={name: SimpleNamespace(weight=(weights or {}).get(name, 1.0), curriculum=None, on_timeout=on_timeout) for name in envs},
        group_size=sizes.__getitem__,
        orchestrator=SimpleNamespace(buffer=buffer, difficulty_filter=SimpleNamespace(max_rounds=max_rounds), **own),
        seed=seed,
        **values,
    )


def collector(*envs: FakeEnv, left_out: Callable[[Sequence[Rollout]], str | None] = lambda _: None, **settings: Any) -> Collector:
    by_name: dict[str, Any] = {env.name: env for env in envs}
    return Collector(config_of(list(by_name), **settings), by_name, left_out)


def indices(batch: list[list[Rollout]]) -> list[int]:
    return [rollouts[0].task.index for rollouts in batch]


async def settled() -> None:
    """Let everything run that waits for no clock."""
    for _ in range(300):
        await asyncio.sleep(0)


def run(main: Callable[[], Any]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(main(), 120)

    return asyncio.run(limited())


async def test_on_policy_batches_are_their_own_groups_in_order_whatever_finishes_first() -> None:
    rng = random.Random(0)
    env = FakeEnv(lambda *_: rng.random() * 0.01)
    groups = collector(env)

    for step in range(3):
        batch = await groups.collect()
        assert indices(batch) == list(range(4 * step, 4 * step + 4))
        assert [[rollout.member for rollout in rollouts] for rollouts in batch] == [[0, 1]] * 4
        await asyncio.sleep(0.02)
        assert len(env.started) == 8 * (step + 1), "a group of the next batch was started before its weights"
        assert groups.phase == f"waiting for weights {step + 1}"
        env.version = step + 1
        groups.set_version(step + 1)
    await groups.close()


@pytest.mark.parametrize("level", [1, 2, 3])
async def test_no_more_batches_are_begun_than_the_bound_allows_and_none_is_too_old(level: int) -> None:
    rng = random.Random(level)
    env = FakeEnv(lambda *_: rng.random() * 0.02)
    groups = collector(env, max_async_level=level)

    for step in range(12):
        batch = await groups.collect()
        oldest = min(int(turn.versions.min()) for rollouts in batch for one in rollouts for turn in turns_of(one))
        assert step - oldest <= level
        version = max(0, step - rng.randrange(level))  # the trainer lags behind
        if version > groups.version:
            env.version = version
            groups.set_version(version)
        begun = len({index for index, _, _ in env.started}) - groups.tally.dropped["off_policy"] // 2
        assert begun <= 4 * (groups.version + level + 1)
    await groups.close()


async def test_a_finished_group_that_waited_too_long_is_dropped() -> None:
    env = FakeEnv()
    groups = collector(env, max_async_level=1)

    await groups.collect()
    await settled()  # the groups of batch 1 finish under version 0
    groups.num_batches = 2  # as if batch 1 had been made of other groups
    env.version = 2
    groups.set_version(2)
    batch = await groups.collect()
    assert min(indices(batch)) >= 8
    assert groups.tally.dropped["off_policy"] == 8
    await groups.close()


def test_never_more_rollouts_in_flight_than_allowed_but_at_least_one_group() -> None:
    env = FakeEnv(lambda *_: 0.002)
    groups = collector(env, max_concurrent=4, num_groups=8)
    assert len(run(groups.collect)) == 8
    assert env.most_in_flight == 4
    small = FakeEnv(lambda *_: 0.002)
    assert len(run(collector(small, max_concurrent=1).collect)) == 4
    assert small.most_in_flight == 2


@pytest.mark.parametrize("whole", [False, True])
async def test_nothing_is_started_while_everything_is_given_up(whole: bool) -> None:
    env = FakeEnv(lambda *_: 3600.0)
    env.scores_groups = whole
    groups = collector(env, max_concurrent=4)

    groups.set_version(0)
    await settled()
    assert len(env.started) == 4
    await groups.close()
    await settled()
    assert len(env.started) == 4
    assert env.in_flight == 0


async def test_nothing_is_started_beyond_the_last_step() -> None:
    env = FakeEnv()
    groups = collector(env, max_steps=2, max_async_level=5)

    await groups.collect()
    await groups.collect()
    await settled()
    assert len(env.started) == 16


PAIR, FOUR, TWICE = [0, 1], [0, 1, 2, 3], ("error", 2)  # `TWICE`: it fails until attempt 2


@pytest.mark.parametrize(
    ("whole", "compares", "does", "settings", "groups", "failed", "dropped", "asked"),
    [
        # a failed member is played again with another attempt
        (False, True, {(2, 1): TWICE}, {}, dict.fromkeys(range(4), PAIR), {"error": 2}, {}, [([0], 0), ([1], 0), ([1], 1), ([1], 2)]),
        # rewards that compare a group are asked for as a whole, and a failed member costs the attempt
        (True, True, {(2, 1): TWICE}, {}, dict.fromkeys(range(4), PAIR), {"error": 2}, {}, [(PAIR, 0), (PAIR, 1), (PAIR, 2)]),
        # in a group of environments only the failed member of one that compares nothing is played again
        (True, False, {(2, 1): TWICE}, {}, dict.fromkeys(range(4), PAIR), {"error": 2}, {}, [(PAIR, 0), ([1], 1), ([1], 2)]),
        # a whole group that ran out of time or of attempts is given up and replaced
        (True, True, {(2, 1): "error"}, {}, dict.fromkeys((0, 1, 3, 4), PAIR), {"error": 3}, {"error": 2}, [(PAIR, n) for n in range(3)]),
        (True, True, {(2, 1): "timeout"}, {}, dict.fromkeys((0, 1, 3, 4), PAIR), {"timeout": 1}, {"timeout": 2}, [(PAIR, 0)]),
        # such rewards are not replaced by 0 when a member runs out of time
        (True, True, {(2, 1): "timeout"}, {"on_timeout": "zero"}, dict.fromkeys((0, 1, 3, 4), PAIR), {"timeout": 1}, {"timeout": 2}, None),
        # a member that ran out of time is not played again
        (False, True, {(2, 1): "timeout"}, {}, dict.fromkeys((0, 1, 3, 4), PAIR), {"timeout": 1}, {"timeout": 2}, [([0], 0), ([1], 0)]),
        # a member costs itself and the others are the group; one survivor is no group
        (
            *(False, True, {(1, 2): "timeout", (2, 0): "error", (3, 0): "error", (3, 1): "timeout", (3, 3): "timeout"}),
            *({"group_size": 4}, {0: FOUR, 1: [0, 1, 3], 2: [1, 2, 3], 4: FOUR}, {"timeout": 3, "error": 6}, {"error": 4}, None),
        ),
    ],
)
def test_what_becomes_of_members_that_fail(
    whole: bool,
    compares: bool,
    does: dict[tuple[int, int], Any],
    settings: dict[str, Any],
    groups: dict[int, list[int]],
    failed: dict[str, int],
    dropped: dict[str, int],
    asked: list[tuple[list[int], int]] | None,
) -> None:
    def behave(task: Task, member: int, attempt: int) -> Any:
        status, until = does[task.index, member] if does.get((task.index, member)) == TWICE else (does.get((task.index, member), 0.0), 99)
        return status if attempt < until else 0.0

    env = FakeEnv(behave)
    env.scores_groups, env.compares = whole, compares
    collecting = collector(env, **settings)
    batch = run(collecting.collect)
    assert {rollouts[0].task.index: [one.member for one in rollouts] for rollouts in batch} == groups
    assert asked is None or sorted((one[1:] for one in env.asked if one[0] == 2), key=lambda one: (one[1], one[0])) == asked
    assert (collecting.tally.failed, collecting.tally.dropped, collecting.in_flight) == (failed, dropped, 0)
    assert sorted(one.arrival for rollouts in batch for one in rollouts)[0] == 0
    assert [rollout.stop for rollout in collecting.tally.failures].count("error") == failed.get("error", 0)


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("whole", [False, True])
def test_a_log_probability_that_is_not_finite_costs_its_rollout_and_is_counted(value: float, whole: bool) -> None:
    class Broken(FakeEnv):
        async def rollout(self, task: Task, member: int, attempt: int) -> Rollout:
            rollout = await super().rollout(task, member, attempt)
            if (task.index, member, attempt) != (1, 1, 0):
                return rollout
            (turn,) = turns_of(rollout)
            return replace(rollout, trace=trace_of(turn, replace(turn, logprobs=np.array([-1.0, value], dtype=np.float32))))

    env = Broken()
    env.scores_groups = whole
    groups = collector(env)
    batch = run(groups.collect)
    assert indices(batch) == [0, 1, 2, 3]
    assert all(np.isfinite(turn.logprobs).all() for rollouts in batch for one in rollouts for turn in turns_of(one))
    assert groups.tally.failed == {"logprob_not_finite": 1}
    assert re.search(r"number 1 of turn 1 of rollout 1 of group 1, has the log-probability", groups.tally.failures[0].error or "")


def test_a_rollout_that_ran_out_of_time_may_count_as_one_without_reward() -> None:
    env = FakeEnv(lambda task, member, attempt: "timeout" if member == 1 else 0.0)
    groups = collector(env, on_timeout="zero")
    batch = run(groups.collect)
    assert indices(batch) == [0, 1, 2, 3]
    assert [(one.reward, one.is_truncated) for rollouts in batch for one in rollouts] == [(1.0, False), (0.0, True)] * 4


async def test_a_fifth_of_timeouts_never_ends_a_run_and_loses_nothing_else() -> None:
    rng = random.Random(0)
    env = FakeEnv(lambda *_: "timeout" if rng.random() < 0.2 else 0.0)
    groups = collector(env, group_size=8, num_groups=8)

    for step in range(40):
        assert len(await groups.collect()) == 8
        env.version = step + 1
        groups.set_version(step + 1)
    await groups.close()
    assert not groups.tally.dropped


async def test_a_replacement_keeps_the_mix_of_environments() -> None:
    bad = FakeEnv(lambda task, member, attempt: "error" if task.example_id % 3 == 0 else 0.0, name="bad")
    good = FakeEnv(name="good")
    groups = collector(bad, good, num_groups=8, max_retries=5)

    for step in range(4):
        batch = await groups.collect()
        assert sorted(rollouts[0].task.env for rollouts in batch) == ["bad"] * 4 + ["good"] * 4
        bad.version = good.version = step + 1
        groups.set_version(step + 1)
    await groups.close()
    assert groups.tally.dropped["error"] > 0


def test_an_environment_that_always_fails_stops_the_run_with_the_last_failure() -> None:
    env = FakeEnv(lambda *_: "error")
    with pytest.raises(RolloutsFailed, match=r"environment e: \d+ of its latest \d+ rollouts failed .*error: because \d+"):
        run(collector(env).collect)


async def test_a_few_bad_examples_do_not_stop_the_run() -> None:
    env = FakeEnv(lambda task, member, attempt: "error" if task.example_id % 10 == 0 else 0.001)
    groups = collector(env, max_retries=3)

    for step in range(20):
        assert len(await groups.collect()) == 4
        env.version = step + 1
        groups.set_version(step + 1)
    await groups.close()


async def test_tokens_older_than_the_servers_claim_to_be_end_the_run() -> None:
    groups = collector(FakeEnv())

    await groups.collect()
    groups.set_version(1)  # the environment's policy stays at version 0
    with pytest.raises(RuntimeError, match="a token of version 0, although all servers had version 1"):
        await groups.collect()


def test_an_exception_in_our_own_code_ends_the_run_instead_of_vanishing() -> None:
    def broken(*_: Any) -> float:
        raise LookupError("a bug")

    with pytest.raises(LookupError, match="a bug"):
        run(collector(FakeEnv(broken)).collect)


def test_an_exception_in_a_group_filter_ends_the_run_instead_of_hanging_it() -> None:
    def broken(rollouts: Sequence[Rollout]) -> str | None:
        raise ValueError("a negative reward")

    groups = collector(FakeEnv())
    groups.filter_reason = broken
    with pytest.raises(ValueError, match="a negative reward"):
        run(groups.collect)


async def test_a_group_given_up_leaves_nothing_running() -> None:
    env = FakeEnv(lambda task, member, attempt: "timeout" if member else 0.01)
    task = Task(env="e", example_id=0, index=0, row={})

    before = asyncio.all_tasks()  # this task; before Python 3.12 `wait_for` adds one for the timeout
    with pytest.raises(GroupFailed):
        await play_group(env, task, 4, 0, RolloutCounters())
    assert env.in_flight == 0
    assert asyncio.all_tasks() == before
