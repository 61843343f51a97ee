"""What failed in a run is counted by cause, and the closing lines say it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from test_rollout_collector import FakeEnv, collector, indices, run
from test_rollout_order import group

from rlx.rollout.failures import MOST, Failures, in_words
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


def test_rewards_that_compare_a_group_are_not_replaced_by_0_when_a_member_runs_out_of_time() -> None:
    env = FakeEnv(lambda task, member, attempt: "timeout" if (task.index, member) == (1, 1) else 0.0)
    env.scores_groups = True
    groups = collector(env, on_timeout="zero")
    assert indices(run(groups.collect)) == [0, 2, 3, 4]
