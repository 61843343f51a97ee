"""The verdict on an environment: facts against numbers by hand, and each way in which one is not worth training on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_rollout_play import outcome as made

from rlx.rollout.results import RESULTS, Outcome, read_results, write_results
from rlx.rollout.worth import Assessment, Verdict, assess, judge


def outcome(reward: float, **fields: Any) -> Outcome:
    timing = {"total": 1.0, "generation": 0.7, "scoring": 0.1}
    defaults: dict[str, Any] = {"rewards": {"right": reward}, "metrics": {"length": 2.0}, "timing": timing, "turns": [(3, 2)]}
    return made(fields.pop("place", 0), fields.pop("rollout", 0), reward, **{**defaults, **fields})


def judged(*examples: list[Outcome]) -> tuple[Assessment, Verdict]:
    facts = assess(examples)
    return facts, judge(facts, max_tokens=12)


def rewards(*groups: list[float]) -> list[list[Outcome]]:
    return [[outcome(reward) for reward in group] for group in groups]


FAILED = {"status": "error", "stop": "environment_error", "error": "ValueError: no; at /my_env.py:4 in f"}


def test_facts_are_those_of_the_rollouts() -> None:
    examples = rewards([1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0])
    examples[0][1] = outcome(0, turns=[(3, 4), (9, 6)], is_truncated=True)
    examples[0][3] = outcome(0, **FAILED)
    facts, verdict = judged(*examples)
    assert (facts.examples, facts.rollouts, facts.per_example, facts.scored, facts.groups) == (3, 12, 4, 11, 3)
    assert facts.baseline is not None
    assert facts.baseline.mean == pytest.approx((1 / 3 + 1 + 0) / 3)  # the failed rollout has no reward
    assert facts.baseline.low < facts.baseline.mean < facts.baseline.high
    assert (facts.differing, facts.equal_low, facts.equal_high) == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert facts.spread == pytest.approx((2 / 9) ** 0.5 / 3)
    assert facts.failed == pytest.approx(1 / 12)
    assert (facts.failures[0].cause, facts.failures[0].count) == ("environment_error", 1)
    assert facts.truncated == pytest.approx(1 / 11)
    assert [(turn.turn, turn.rollouts, turn.prompt) for turn in facts.turns] == [(1, 11, 3.0), (2, 1, 9.0)]
    assert facts.turns[0].sampled == pytest.approx((10 * 2 + 4) / 11)
    assert facts.seconds == pytest.approx({"generation": 0.7, "environment": 0.2, "scoring": 0.1})
    assert facts.by_function == pytest.approx({"right": 5 / 11, "length": 2.0})
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
    _, verdict = judged(*examples)
    assert (verdict.playable, verdict.worth) == (True, False)
    assert any(says in reason for reason in verdict.reasons), verdict.reasons


def test_what_never_ends_is_not_playable() -> None:
    facts, verdict = judged([outcome(0, **FAILED), outcome(0, **FAILED)])
    assert (facts.baseline, verdict.playable, verdict.worth) == (None, False, False)
    assert "environment_error; the first: ValueError: no; at /my_env.py:4" in verdict.reasons[1]


def test_rewards_of_another_scale_are_compared_with_those_seen() -> None:
    facts, verdict = judged(*rewards([-1, 1], [1, -1], [-1, -1]))
    assert (facts.scale, facts.level) == ((-1, 1), pytest.approx(1 / 3))
    assert verdict.worth


def test_cut_rollouts_are_named_and_do_not_decide() -> None:
    _, verdict = judged([outcome(1, is_truncated=True), outcome(0, is_truncated=True)])
    assert verdict.worth
    assert any("sampling.max_tokens=12" in note for note in verdict.notes)


def test_the_file_of_an_evaluation_can_be_read_again(tmp_path: Path) -> None:
    examples = [
        [outcome(1, place=3), outcome(0, place=3, rollout=1, **FAILED)],
        [outcome(1, place=9), outcome(0, place=9, rollout=1)],
    ]
    write_results(tmp_path, examples, {}, 0.5)
    found = assess(read_results(tmp_path / RESULTS))
    assert found == assess(examples)


def test_the_members_that_a_failed_group_takes_with_it_are_no_cause() -> None:
    facts, _ = judged([outcome(0, **FAILED), outcome(0, status="cancelled", stop="group_failed", error="another failed")])
    assert [(one.cause, one.count) for one in facts.failures] == [("environment_error", 1)]
