"""Groups that fail, hang or are cut short by the end of an attempt."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_codec_records import same
from test_rollout_collector import FakeEnv, collector, indices, run, settled
from test_rollout_order import group
from traces import turns_of

from rlx.codec import decode, encode
from rlx.rollout.collector import Collector
from rlx.rollout.failures import MAX_CAUSES, ErrorRate, Failures, RolloutsFailed, in_words
from rlx.rollout.groups import play_with_outage_retry
from rlx.rollout.state import CollectorState, OrchestratorState
from rlx.types import Rollout, Task


def test_failures_are_counted_by_cause_and_said_with_the_users_line(tmp_path):
    failures = Failures()
    for index in range(6):
        raised, fine = group(index, 1, 0)
        failures.add([replace(raised, error=f"exact raised KeyError: no key 'a{index}'; at /my/env.py:41 in exact"), fine])
    failures.add([replace(raised, error="exact raised OSError", status="error", stop="reward_raised")])
    timeout = replace(fine, status="timeout", stop="timeout", error="no result after 3 s (rollout_timeout)")
    failures.add([timeout, timeout])
    failures.write(tmp_path / "failures.json")
    assert in_words(json.loads((tmp_path / "failures.json").read_text())) == [
        "6 × e, reward raised: exact raised KeyError: no key 'a0'; at /my/env.py:41 in exact",
        "2 × e, timeout: no result after 3 s (rollout_timeout)",
        "1 × e, reward raised: exact raised OSError",
    ]


def test_without_failures_there_is_no_file_and_with_many_causes_it_stays_small(tmp_path):
    failures = Failures()
    failures.write(tmp_path / "failures.json")
    assert not (tmp_path / "failures.json").exists()
    one = group(0, 0)[0]
    failures.add(replace(one, status="error", stop="error", error="x" * length) for length in range(MAX_CAUSES + 50))
    failures.write(tmp_path / "failures.json")
    found = json.loads((tmp_path / "failures.json").read_text())
    assert found["causes"][0] == {"env": "e", "what": "error", "count": 50, "first": "other causes"}
    assert in_words(found)[-1] == "and 17 other causes"


def test_a_timeout_while_no_server_took_requests_is_played_again_with_the_same_seeds_and_is_no_failure() -> None:
    away = 0.0

    def behave(task: Task, member: int, attempt: int) -> Any:
        nonlocal away
        late = len(env.started) <= 3
        away += late  # the outage grows during these
        return "timeout" if late else 0.0

    env = FakeEnv(behave)
    groups = collector(env, num_groups=1)
    groups.outage_seconds = lambda: away
    (rollouts,) = run(groups.collect)
    assert [rollout.status for rollout in rollouts] == ["ok", "ok"]
    assert {attempt for _, _, attempt in env.started} == {0}
    assert len(env.started) > 3
    assert not groups.tally.failed
    assert not groups.tally.dropped


def test_a_rollout_that_was_scored_early_while_no_server_took_requests_is_played_again() -> None:
    inner, away = FakeEnv(lambda task, member, attempt: 0.0), 0.0

    class Cut:
        async def play(self, task: Task, members: Any, attempt: int) -> Any:
            nonlocal away
            rollouts, late = await inner.play(task, members, attempt), len(inner.started) < 2
            away += late
            return [replace(rollout, timing={**rollout.timing, "cut_short": float(late)}) for rollout in rollouts]

    task = Task(env="e", example_id=0, index=0, row={})
    (rollout,) = run(lambda: play_with_outage_retry(Cut(), task, [0], 0, lambda: away))  # type: ignore[arg-type]
    assert (rollout.timing["cut_short"], len(inner.started)) == (0.0, 2)


def test_what_earlier_attempts_have_finished_counts_for_the_share_of_failures() -> None:
    failed = [replace(rollout, status="error", stop="x", error="broken") for rollout in group(0, *[0.0] * 20)]
    with pytest.raises(RolloutsFailed):
        ErrorRate(0.5).add("e", failed)
    errors = ErrorRate(0.5)
    errors.succeeded("e", 2000)
    errors.add("e", failed)


async def first_batch(groups: Collector, env: FakeEnv) -> list[list[Rollout]]:
    """The batch of step 0, without group 1, which still plays. The servers have version 1 afterwards."""
    batch = await groups.collect()
    assert indices(batch) == [0, 2, 3, 4]
    env.version = 1
    groups.set_version(1)
    return batch


async def test_a_group_that_would_expire_is_waited_for_so_that_long_rollouts_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.rollout.collector.MIN_WAIT_SECONDS", 60.0)  # also on a machine that pauses
    rng = random.Random(0)
    lengths: dict[tuple[int, int], float] = {}

    def heavy_tail(task: Task, member: int, attempt: int) -> float:
        return lengths.setdefault((task.index, member), min(0.1, 0.002 * rng.paretovariate(0.8)))

    env = FakeEnv(heavy_tail, size=1000)
    groups = collector(env, max_async_level=1, group_size=4, max_steps=30)

    for step in range(30):
        await groups.collect()
        env.version = step + 1
        groups.set_version(step + 1)
    assert groups.tally.dropped == {}
    assert len(lengths) == 30 * 16, "every rollout that began is in a batch"


async def test_a_group_that_hangs_does_not_hold_up_the_batch_and_is_dropped_counted_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.rollout.collector.MIN_WAIT_SECONDS", 0.1)
    env = FakeEnv(lambda task, member, attempt: 3600.0 if task.index == 1 else 0.0)
    groups = collector(env, max_async_level=1)

    first = await first_batch(groups, env)
    second = await groups.collect()
    assert 1 not in indices(second)
    assert groups.tally.dropped == {"off_policy": 2}
    await settled()
    assert 1 in env.ended, "the update to version 2 would still pause and continue its requests"
    env.version = 2
    groups.set_version(2)
    third = await groups.collect()
    assert len({*indices(first), *indices(second), *indices(third)}) == 12
    await groups.close()


def through_a_file(state: CollectorState) -> CollectorState:
    return decode(bytearray(encode(OrchestratorState(collector=state))), OrchestratorState).collector


class Picture:
    """An object that an environment may put into a message."""

    def __repr__(self) -> str:
        return "a picture"


def test_a_collector_goes_on_from_a_file_with_its_finished_groups_and_its_counters() -> None:
    async def begun() -> tuple[CollectorState, list[list[Rollout]]]:
        env = FakeEnv(lambda task, member, attempt: "error" if (task.index, attempt) == (2, 0) else 0.0)
        groups = collector(env, oversampling_factor=3, max_async_level=1)
        groups.filter_reason = lambda rollouts: "zero_advantage" if rollouts[0].task.index == 1 else None
        groups.set_version(0)
        await groups.collect()
        while groups.in_flight:
            await asyncio.sleep(0.001)
        shown = {"prompt": np.float32(1), "completion": [{"content": Picture()}]}
        groups.tally.failures[0] = replace(groups.tally.failures[0], **shown)
        state = through_a_file(groups.state())
        batch = await groups.collect()
        await groups.close()
        return state, batch

    state, expected = run(begun)
    assert len(state.finished) >= 4
    assert all(rollout.task.row == {} for group in state.finished for rollout in group.rollouts)
    assert state.tally.failed == {"error": 2}
    assert (state.tally.failures[0].prompt, state.tally.failures[0].completion) == (1.0, [{"content": "a picture"}])
    assert [group.rule for group in state.filtered] in ([], ["zero_advantage"])

    async def go_on() -> list[list[Rollout]]:
        groups = collector(FakeEnv(), oversampling_factor=3, max_async_level=1)
        groups.restore(state)
        assert (groups.num_batches, groups.tally.failed["error"], groups.tally.finished) == (1, 2, state.tally.finished)
        again = groups.state()
        assert [group.rollouts[0].task for group in again.finished] == [group.rollouts[0].task for group in state.finished]
        batch = await groups.collect()
        await groups.close()
        return batch

    went_on = run(go_on)
    assert indices(went_on) == indices(expected)
    assert same([[turns_of(one) for one in group] for group in went_on], [[turns_of(one) for one in group] for group in expected])
    assert all(one.task.row["example_id"] == one.task.example_id for group in went_on for one in group)
