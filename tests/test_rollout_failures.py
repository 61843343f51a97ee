"""What failed in a run is counted by cause, and the closing lines say it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from test_rollout_collector import FakeEnv, collector, indices, run
from test_rollout_order import group

from rlx.rollout.failures import MOST, ErrorRate, Failures, RolloutsFailed, in_words
from rlx.rollout.groups import play_through
from rlx.types import Task


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
    failures.add(replace(one, status="error", stop="error", error="x" * length) for length in range(MOST + 50))
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
    groups.away = lambda: away
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
    (rollout,) = run(lambda: play_through(Cut(), task, [0], 0, lambda: away))  # type: ignore[arg-type]
    assert (rollout.timing["cut_short"], len(inner.started)) == (0.0, 2)


def test_what_earlier_attempts_have_finished_counts_for_the_share_of_failures() -> None:
    failed = [replace(rollout, status="error", stop="x", error="broken") for rollout in group(0, *[0.0] * 20)]
    with pytest.raises(RolloutsFailed):
        ErrorRate(0.5).add("e", failed)
    errors = ErrorRate(0.5)
    errors.succeeded("e", 2000)
    errors.add("e", failed)


def test_rewards_that_compare_a_group_are_not_replaced_by_0_when_a_member_runs_out_of_time() -> None:
    env = FakeEnv(lambda task, member, attempt: "timeout" if (task.index, member) == (1, 1) else 0.0)
    env.scores_groups = True
    groups = collector(env, on_timeout="zero")
    assert indices(run(groups.collect)) == [0, 2, 3, 4]
