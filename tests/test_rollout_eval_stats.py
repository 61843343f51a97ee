"""avg@n and pass@k against brute force, and their intervals against closed forms and an independent bootstrap."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
from test_rollout_runner import outcome

from rlx.rollout.eval_results import attempts
from rlx.rollout.eval_stats import average, estimate, pass_at_k, passes, wilson
from rlx.rollout.evaluation import score_metrics


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
