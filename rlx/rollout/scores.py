"""Statistics of an evaluation: avg@n and pass@k over examples, each with a 95 % confidence interval.

Pure functions of numbers, for evaluations beside training and for any other.

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


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over examples: `Estimate(mean=0.75, low=0.51, high=0.9)`."""

    mean: float
    low: float  # 95 % confidence interval
    high: float


def pass_at_k(rollouts: int, passed: int, k: int) -> float:
    """The probability that at least one of `k` rollouts of an example passes, estimated from `rollouts` of which `passed` did.

    The unbiased estimator 1 - C(n-c, k) / C(n, k) of Chen et al. 2021 (arXiv 2107.03374). Raises ValueError unless 1 ≤ k ≤ n.
    """
    if not 1 <= k <= rollouts or not 0 <= passed <= rollouts:
        raise ValueError(f"pass@{k} cannot be estimated from {rollouts} rollouts of which {passed} passed")
    return 1.0 - math.comb(rollouts - passed, k) / math.comb(rollouts, k)


def ks_of(rollouts: int) -> list[int]:
    """The k of pass@k that are reported for this many rollouts of an example: powers of 2, as verifiers and prime-rl do."""
    return [2**i for i in range(rollouts.bit_length())]


def estimate(scores: Sequence[float] | NDArray[np.floating], draws: int) -> Estimate:
    """The mean of one score per example [N]. `draws`: rollouts behind all of them. Raises ValueError if there is no example."""
    values = np.asarray(scores, dtype=np.float64)
    if not len(values):
        raise ValueError("a mean over no examples")
    count, mean = len(values), float(values.mean())
    stderr = float(values.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    if values.min() >= 0 and values.max() <= 1:
        low, high = wilson(mean, _effective(mean, stderr, count, draws))
    else:
        low, high = mean - Z * stderr, mean + Z * stderr
    return Estimate(mean, low, high)


def wilson(mean: float, draws: float) -> tuple[float, float]:
    """Wilson's 95 % score interval of a proportion `mean` of `draws` independent draws."""
    middle = (mean + Z * Z / (2 * draws)) / (1 + Z * Z / draws)
    half = Z / (1 + Z * Z / draws) * math.sqrt(mean * (1 - mean) / draws + Z * Z / (4 * draws * draws))
    return max(0.0, min(middle - half, mean)), min(1.0, max(middle + half, mean))


def _effective(mean: float, stderr: float, examples: int, draws: int) -> float:
    """The number of independent draws whose proportion `mean` would have this standard error, between examples and draws."""
    variance = mean * (1 - mean)
    if not stderr > 0 or variance <= 0:  # all examples have one score
        return examples
    return min(max(variance / stderr**2, examples), max(draws, examples))


def average(rewards: Sequence[Sequence[float]]) -> Estimate:
    """avg@n: the mean reward, over examples, of the n rollouts of each. `rewards` [N][n]."""
    return estimate([float(np.mean(one)) for one in rewards], sum(map(len, rewards)))


FAILED = -math.inf


def passes(rewards: Sequence[Sequence[float]], threshold: float) -> dict[int, Estimate]:
    """pass@k for every reported k: the mean over examples of `pass_at_k`. A rollout passes if its reward is at least `threshold`.

    `rewards` [N][n]; every example has the same number of rollouts. A rollout that failed has `FAILED`, which passes no threshold.
    """
    rollouts = len(rewards[0])
    assert all(len(one) == rollouts for one in rewards), "examples with different numbers of rollouts"
    passed = [sum(reward >= threshold for reward in one) for one in rewards]
    draws = rollouts * len(rewards)
    return {k: estimate([pass_at_k(rollouts, each, k) for each in passed], draws // k) for k in ks_of(rollouts)}
