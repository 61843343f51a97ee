"""What an evaluation says: scores with their intervals, its table, the report on an environment."""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_rollout_runner import outcome
from test_rollout_runner import outcome as made

from rlx.cli.eval_display import eval_table
from rlx.config.schema import BufferConfig, DifficultyFilter
from rlx.metrics import MetricsWriter
from rlx.paths import RunPaths
from rlx.rollout.env_report import EnvReport, diagnose
from rlx.rollout.eval_results import RESULTS, Outcome, attempts, read_results, write_results
from rlx.rollout.eval_stats import at_least, average, estimate, pass_at_k, passes, wilson
from rlx.rollout.eval_summary import write_summary
from rlx.rollout.evaluation import score_metrics
from rlx.rollout.example_sampler import ExampleSampler
from rlx.rollout.filters import reason_to_drop


@pytest.mark.parametrize("rollouts", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_k_subsets_with_a_rollout_that_passes(rollouts: int) -> None:
    for passed, k in itertools.product(range(rollouts + 1), range(1, rollouts + 1)):
        outcomes = [True] * passed + [False] * (rollouts - passed)
        subsets = list(itertools.combinations(outcomes, k))
        assert pass_at_k(rollouts, passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_a_rollout_that_failed_passes_no_threshold() -> None:
    """It scores 0, which rewards from -1 to 1 would call a pass."""
    examples = [[outcome(place, 0, -1.0), outcome(place, 1, 0.0, status="error")] for place in range(2)]
    assert passes(attempts(examples), 0.0)[2].mean == 0.0
    assert score_metrics("e", examples, 0.0)["eval/e/pass@1"] == 0.0
    examples[0][0] = outcome(0, 0, 0.0)
    assert passes(attempts(examples), 0.0)[2].mean == 0.5


def test_a_threshold_is_met_up_to_rounding_wherever_there_is_one() -> None:
    """In pass@k, in the filters of groups, and in the pools of a buffer."""
    whole, part = 0.7 + 0.2 + 0.1, 0.1 + 0.2 - 0.3
    assert (whole < 1, part > 0) == (True, True), "which it is not bit for bit"
    assert passes([[whole, part]], 1.0)[1].mean == 0.5
    kept = DifficultyFilter(min_reward=1.0), DifficultyFilter(max_reward=0.7)
    groups: Any = [SimpleNamespace(reward=whole)] * 4, [SimpleNamespace(reward=0.7)] * 12
    assert float(np.mean([0.7] * 12)) > 0.7
    assert [reason_to_drop(group, each, lambda _: []) for each, group in zip(kept, groups, strict=True)] == [None, None]
    sampler = ExampleSampler("e", [{}, {}], 0, BufferConfig(easy_threshold=1.0, hard_threshold=0.0))
    sampler.played(0, whole)
    sampler.played(1, part)
    assert sampler.counts() == {"normal": 0, "easy": 1, "hard": 1}
    assert not at_least(0.999999, 1.0)


def test_one_rollout_an_example_gives_wilsons_interval() -> None:
    """The closed form, with the numbers of Brown, Cai and DasGupta's formula for 15 of 20."""
    found = average([[1.0]] * 15 + [[0.0]] * 5)
    n, p, z = 20, 0.75, 1.959963984540054
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    assert (found.low, found.high) == pytest.approx((middle - half, middle + half))
    assert wilson(0.75, 20) == pytest.approx((0.5313, 0.8881), abs=1e-4)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_all_the_same_is_not_certainty(value: float) -> None:
    found = average([[value] * 4] * 30)
    assert found.mean == value
    assert found.high - found.low == pytest.approx(0.1135, abs=1e-3)
    assert 0.0 <= found.low <= found.mean <= found.high <= 1.0


def test_the_interval_covers_the_truth_in_about_95_of_100_evaluations() -> None:
    rng, hits = random.Random(2), 0
    for _ in range(400):
        rewards = [[float(rng.random() < p) for _ in range(4)] for p in (rng.betavariate(2, 0.5) for _ in range(40))]
        found = average(rewards)
        hits += found.low <= 0.8 <= found.high  # the mean of that beta distribution
    assert 0.92 <= hits / 400 <= 0.98


def test_rewards_outside_0_to_1_get_the_usual_interval_and_one_example_gets_none() -> None:
    scores = [-1.0, 2.0, 0.5, 3.0]
    found = estimate(scores, 4)
    half = 1.959963984540054 * statistics.stdev(scores) / 2
    assert (found.low, found.high) == pytest.approx((found.mean - half, found.mean + half))
    assert math.isnan(average([[2.0, 3.0]]).low)


def rows() -> list[dict[str, Any]]:
    scores = {"avg@2": 0.5, "avg@2_low": 0.4, "avg@2_high": 0.6, "pass@1": 0.5, "pass@2": 0.7}
    facts = {"examples": 10.0, "error_frac": 0.1, "truncated_frac": 0.0, "completion_mean": 5.0}
    return [{"step": step, "env": env, **scores, **facts, f"reward/{env}": 0.5} for step in (0, 10) for env in ("a", "b")]


def test_the_table_has_every_score_with_its_interval() -> None:
    head, cells = eval_table(rows())
    assert head == ["step", "env", "examples", "avg@2", "pass@1", "pass@2", "tokens", "errors", "truncated"]
    assert cells[0] == ["base", "a", "10", "0.500 [0.400, 0.600]", "0.500", "0.700", "5.0", "10.0%", "0.0%"]
    assert eval_table([rows()[0], rows()[2] | {"attested": 0.999}])[1][1][-1] == "99.9%"


def test_the_summary_is_written_as_json_and_csv(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for step in (10, 0):
        values = {f"eval/{row['env']}/{name}": value for row in rows()[:2] for name, value in row.items() if name not in ("step", "env")}
        MetricsWriter(paths.metrics, "eval").write(step, values | ({"eval/attested": 1.0} if step else {}))
    write_summary(paths, ["a", "b", "c"], {"model": "m"})
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["rows"] == [{**row, **({"attested": 1.0} if row["step"] else {})} for row in rows()]
    with (tmp_path / "summary.csv").open() as file:
        assert [row["env"] for row in csv.DictReader(file)] == ["a", "b", "a", "b"]


def played(reward: float, **fields: Any) -> Outcome:
    timing = {"total": 1.0, "generation": 0.7, "scoring": 0.1}
    defaults: dict[str, Any] = {"rewards": {"right": reward}, "metrics": {"length": 2.0}, "timing": timing, "turns": [(3, 2)]}
    return made(fields.pop("place", 0), fields.pop("rollout", 0), reward, **{**defaults, **fields})


def judged(*examples: list[Outcome]) -> EnvReport:
    return diagnose(examples, max_tokens=12)


def rewards(*groups: list[float]) -> list[list[Outcome]]:
    return [[played(reward) for reward in group] for group in groups]


FAILED = {"status": "error", "stop": "environment_error", "error": "ValueError: no; at /my_env.py:4 in f"}


def test_facts_are_those_of_the_rollouts() -> None:
    examples = rewards([1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0])
    examples[0][1] = played(0, turns=[(3, 4), (9, 6)], is_truncated=True)
    examples[0][3] = played(0, **FAILED)
    verdict = judged(*examples)
    facts = verdict.facts
    assert (facts["examples"], facts["rollouts_per_example"], facts["causes"]) == (3, 4, {"environment_error": 1})
    assert facts["baseline"] == pytest.approx((1 / 3 + 1 + 0) / 3)  # the failed rollout has no reward
    assert facts["baseline_low"] < facts["baseline"] < facts["baseline_high"]
    assert (facts["failed"], facts["differing"], facts["truncated"]) == pytest.approx((1 / 12, 1 / 3, 1 / 11))
    assert (facts["tokens"], facts["seconds"]) == pytest.approx((30 / 11, 1.0))
    assert facts["functions"] == pytest.approx({"right": 5 / 11, "length": 2.0})
    assert verdict.trainable
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
        ([[played(1), played(0), played(0, **FAILED)]], "33 % of the rollouts failed, most by environment_error; the first: ValueError"),
        ([[played(1), played(0, metrics={"reward_error": 1.0}, error="right raised KeyError")]], "raised in 50 % of the rollouts"),
        (rewards([-1, 10], [10, 10], [10, 10], [10, 10]), "above 80 % of 10"),
    ],
)
def test_what_is_not_worth_training_on_says_why(examples: list[list[Outcome]], says: str) -> None:
    verdict = judged(*examples)
    assert (verdict.playable, verdict.trainable) == (True, False)
    assert any(says in reason for reason in verdict.reasons), verdict.reasons


def test_what_never_ends_is_not_playable() -> None:
    verdict = judged([played(0, **FAILED), played(0, **FAILED)])
    assert ("baseline" in verdict.facts, verdict.playable, verdict.trainable) == (False, False, False)
    assert "environment_error; the first: ValueError: no; at /my_env.py:4" in verdict.reasons[1]


def test_rewards_of_another_scale_are_compared_with_those_seen() -> None:
    assert judged(*rewards([-1, 1], [1, -1], [-1, -1])).trainable


def test_cut_rollouts_are_named_and_do_not_decide() -> None:
    verdict = judged([played(1, is_truncated=True), played(0, is_truncated=True)])
    assert verdict.trainable
    assert any("sampling.max_tokens=12" in note for note in verdict.notes)


def test_the_file_of_an_evaluation_can_be_read_again(tmp_path: Path) -> None:
    examples = [
        [played(1, place=3), played(0, place=3, rollout=1, **FAILED)],
        [played(1, place=9), played(0, place=9, rollout=1)],
    ]
    write_results(tmp_path, examples, {}, 0.5)
    assert judged(*read_results(tmp_path / RESULTS)) == judged(*examples)


def test_the_members_that_a_failed_group_takes_with_it_are_no_cause() -> None:
    verdict = judged([played(0, **FAILED), played(0, status="cancelled", stop="group_failed", error="another failed")])
    assert verdict.facts["causes"] == {"environment_error": 1}
