"""The verdict on an environment: facts against numbers by hand, and each way in which one is not worth training on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_rollout_runner import outcome as made

from rlx.rollout.env_report import EnvReport, diagnose
from rlx.rollout.eval_results import RESULTS, Outcome, read_results, write_results


def outcome(reward: float, **fields: Any) -> Outcome:
    timing = {"total": 1.0, "generation": 0.7, "scoring": 0.1}
    defaults: dict[str, Any] = {"rewards": {"right": reward}, "metrics": {"length": 2.0}, "timing": timing, "turns": [(3, 2)]}
    return made(fields.pop("place", 0), fields.pop("rollout", 0), reward, **{**defaults, **fields})


def judged(*examples: list[Outcome]) -> EnvReport:
    return diagnose(examples, max_tokens=12)


def rewards(*groups: list[float]) -> list[list[Outcome]]:
    return [[outcome(reward) for reward in group] for group in groups]


FAILED = {"status": "error", "stop": "environment_error", "error": "ValueError: no; at /my_env.py:4 in f"}


def test_facts_are_those_of_the_rollouts() -> None:
    examples = rewards([1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0])
    examples[0][1] = outcome(0, turns=[(3, 4), (9, 6)], is_truncated=True)
    examples[0][3] = outcome(0, **FAILED)
    verdict = judged(*examples)
    facts = verdict.facts
    assert (facts["examples"], facts["rollouts_per_example"], facts["causes"]) == (3, 4, {"environment_error": 1})
    assert facts["baseline"] == pytest.approx((1 / 3 + 1 + 0) / 3)  # the failed rollout has no reward
    assert facts["baseline_low"] < facts["baseline"] < facts["baseline_high"]
    assert (facts["failed"], facts["differing"], facts["truncated"]) == pytest.approx((1 / 12, 1 / 3, 1 / 11))
    assert (facts["tokens"], facts["seconds"]) == pytest.approx((30 / 11, 1.0))
    assert facts["functions"] == pytest.approx({"right": 5 / 11, "length": 2.0})
    assert verdict.worth
    assert any("my_env.py:4" in note for note in verdict.notes)


@pytest.mark.parametrize(
    ("examples", "says"),
    [
        (rewards([0, 0], [0, 0]), "too hard"),
        (rewards([1, 1], [1, 1]), "can do all of it"),
        (rewards([1, 1], [0, 0]), "never differ inside a group"),
        (rewards([1, 0], *[[1, 1]] * 9), "above 80 % of 1"),
        (rewards([1, 0], *[[0, 0]] * 14), "only in 7 % of the groups"),
        (rewards([-1, -1], [-1, -1]), "all rewards are -1"),
        (rewards([1], [0]), "must be 2 or more"),
        ([[outcome(1), outcome(0), outcome(0, **FAILED)]], "33 % of the rollouts failed, most by environment_error; the first: ValueError"),
        ([[outcome(1), outcome(0, metrics={"reward_error": 1.0}, error="right raised KeyError")]], "raised in 50 % of the rollouts"),
        (rewards([-1, 10], [10, 10], [10, 10], [10, 10]), "above 80 % of 10"),
    ],
)
def test_what_is_not_worth_training_on_says_why(examples: list[list[Outcome]], says: str) -> None:
    verdict = judged(*examples)
    assert (verdict.playable, verdict.worth) == (True, False)
    assert any(says in reason for reason in verdict.reasons), verdict.reasons


def test_what_never_ends_is_not_playable() -> None:
    verdict = judged([outcome(0, **FAILED), outcome(0, **FAILED)])
    assert ("baseline" in verdict.facts, verdict.playable, verdict.worth) == (False, False, False)
    assert "environment_error; the first: ValueError: no; at /my_env.py:4" in verdict.reasons[1]


def test_rewards_of_another_scale_are_compared_with_those_seen() -> None:
    assert judged(*rewards([-1, 1], [1, -1], [-1, -1])).worth


def test_cut_rollouts_are_named_and_do_not_decide() -> None:
    verdict = judged([outcome(1, is_truncated=True), outcome(0, is_truncated=True)])
    assert verdict.worth
    assert any("sampling.max_tokens=12" in note for note in verdict.notes)


def test_the_file_of_an_evaluation_can_be_read_again(tmp_path: Path) -> None:
    examples = [
        [outcome(1, place=3), outcome(0, place=3, rollout=1, **FAILED)],
        [outcome(1, place=9), outcome(0, place=9, rollout=1)],
    ]
    write_results(tmp_path, examples, {}, 0.5)
    assert judged(*read_results(tmp_path / RESULTS)) == judged(*examples)


def test_the_members_that_a_failed_group_takes_with_it_are_no_cause() -> None:
    verdict = judged([outcome(0, **FAILED), outcome(0, status="cancelled", stop="group_failed", error="another failed")])
    assert verdict.facts["causes"] == {"environment_error": 1}
