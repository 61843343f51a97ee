"""Statistics of an evaluation: avg@n and pass@k over examples, each with a 95 % confidence interval. Pure functions of numbers.

The examples are the sample: a larger evaluation would have more of them. So every interval is over examples, and the rollouts of one
example are one cluster (Miller 2024, "Adding Error Bars to Evals", arXiv 2411.00640). The standard error of the mean of N examples' scores
is their standard deviation / √N. It includes the chance of sampling, because each example's score does.

The usual interval, mean ± 1.96 standard errors, is wrong near 0 and 1: a model that solves all of 30 examples would get [1, 1]. For scores
in [0, 1] the interval is therefore Wilson's score interval, with the effective number of independent draws that the standard error implies
(Franco et al. 2019, "Comparative Study of Confidence Intervals for Proportions in Complex Sample Surveys"). It is at least the number of
examples and at most that of rollouts. Scores outside [0, 1] get the usual interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Z = 1.959963984540054  # the normal distribution has 95 % within ± Z standard deviations
ROUNDING = 1e-12
FAILED = -math.inf  # score of a rollout that failed: it passes no threshold


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over examples: `Estimate(mean=0.75, low=0.51, high=0.9)`."""

    mean: float
    low: float  # 95 % confidence interval
    high: float


def pass_at_k(rollouts: int, passed: int, k: int) -> float:
    """The probability that at least one of `k` rollouts of an example passes, estimated from `rollouts` of which `passed` did.

    The unbiased estimator 1 - C(n-c, k) / C(n, k) of Chen et al. 2021 (arXiv 2107.03374), for 1 ≤ k ≤ n.
    """
    return 1.0 - math.comb(rollouts - passed, k) / math.comb(rollouts, k)


def estimate(scores: Sequence[float] | NDArray[np.floating], draws: int) -> Estimate:
    """The mean of one score per example [N]. `draws`: rollouts behind all of them."""
    values = np.asarray(scores, dtype=np.float64)
    count, mean = len(values), float(values.mean())
    stderr = float(values.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    if values.min() < 0 or values.max() > 1:
        return Estimate(mean, mean - Z * stderr, mean + Z * stderr)
    variance, independent = mean * (1 - mean), float(count)
    if stderr > 0 and variance > 0:  # else all examples have one score
        independent = min(max(variance / stderr**2, count), max(draws, count))
    return Estimate(mean, *wilson(mean, independent))


def wilson(mean: float, draws: float) -> tuple[float, float]:
    """Wilson's 95 % score interval of a proportion `mean` of `draws` independent draws."""
    middle = (mean + Z * Z / (2 * draws)) / (1 + Z * Z / draws)
    half = Z / (1 + Z * Z / draws) * math.sqrt(mean * (1 - mean) / draws + Z * Z / (4 * draws * draws))
    return max(0.0, min(middle - half, mean)), min(1.0, max(middle + half, mean))


def at_least(value: float, bound: float) -> bool:
    """`value >= bound` up to rounding: three rewards of weights 0.7, 0.2 and 0.1 sum to 0.9999999999999999."""
    return value >= bound or math.isclose(value, bound, rel_tol=ROUNDING, abs_tol=ROUNDING)


def average(rewards: Sequence[Sequence[float]]) -> Estimate:
    """avg@n: the mean reward, over examples, of the n rollouts of each. `rewards` [N][n]."""
    return estimate([float(np.mean(one)) for one in rewards], sum(map(len, rewards)))


def passes(rewards: Sequence[Sequence[float]], threshold: float) -> dict[int, Estimate]:
    """pass@k for k = 1, 2, 4, … up to n: the mean over examples of `pass_at_k`. A rollout passes if its reward is at least `threshold`.

    `rewards` [N][n]; every example has the same number of rollouts. A rollout that failed has `FAILED`, which passes no threshold.
    """
    rollouts = len(rewards[0])
    assert all(len(one) == rollouts for one in rewards), "examples with different numbers of rollouts"
    passed = [sum(at_least(reward, threshold) for reward in one) for one in rewards]
    ks = [2**i for i in range(rollouts.bit_length())]
    return {k: estimate([pass_at_k(rollouts, each, k) for each in passed], rollouts * len(rewards) // k) for k in ks}
