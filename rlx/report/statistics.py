"""Statistics over the runs of a sweep: interquartile means with bootstrap intervals, and bands over seeds.

Pure functions of numbers. The intervals of an evaluation, over its examples, are in `rlx.rollout.eval_stats`.

The *runs* are the sample here: another seed is another draw of the whole training. Following Agarwal et al. 2021 ("Deep Reinforcement
Learning at the Edge of the Statistical Precipice", arXiv 2108.13264):

- A set of runs is summarised by the interquartile mean (IQM), the mean of the middle half of its scores. One run that diverged moves
  it less than the mean, and it uses more of the runs than the median does.
- Its interval is the 2.5 % and 97.5 % quantile of the IQM of resampled runs, which are drawn with replacement.

With few runs such an interval is too narrow: among 3 runs, the bootstrap cannot see a fourth outcome. `FEW` is where pages warn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
RESAMPLES = 2000  # the error of an interval's end is then about 1/20 of the interval's width
FEW = 5  # runs below which a bootstrap interval is visibly too narrow
SEED = 20211  # the same page for the same runs

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A summary of several runs: `Interval(value=0.93, low=0.91, high=0.95, runs=10)`."""

    value: float
    low: float | None  # None: a single run says nothing about the spread
    high: float | None
    runs: int


@dataclass(frozen=True, slots=True)
class Band:
    """The mean of several runs' curves at each of T steps, with an interval."""

    mean: Array  # [T]
    low: Array  # [T] NaN where fewer than two runs have a value
    high: Array  # [T]
    runs: NDArray[np.int64]  # [T] runs that have a value there


def iqm(scores: Array) -> Array:
    """The interquartile mean over the last axis: [..., N] → [...]. The lowest and the highest ⌊N/4⌋ scores are left out.

    As in the authors' library (scipy's `trim_mean` with 0.25). With fewer than 4 scores it is the mean. Raises ValueError if N is 0.
    """
    count = scores.shape[-1]
    if count == 0:
        raise ValueError("an interquartile mean of no scores")
    cut = count // 4
    middle = np.partition(scores, (cut, count - 1 - cut), axis=-1)[..., cut : count - cut]
    return middle.mean(axis=-1)


def iqm_interval(scores: Sequence[float], *, resamples: int = RESAMPLES, seed: int = SEED) -> Interval:
    """The IQM of scores with its bootstrap interval. A single run has none. Raises ValueError if there is no run."""
    return _interval(scores, iqm, resamples, seed)


def mean_interval(values: Sequence[float], *, resamples: int = RESAMPLES, seed: int = SEED) -> Interval:
    """The mean of at least one value with its bootstrap interval. A single value has none.

    Meant for differences of two settings in the same seeds: what a seed does to both cancels out.
    """
    return _interval(values, lambda drawn: drawn.mean(axis=-1), resamples, seed)


def _interval(values: Sequence[float], summary: Callable[[Array], Array], resamples: int, seed: int) -> Interval:
    row = np.asarray(values, dtype=np.float64)
    value = float(summary(row))
    if len(row) < 2:
        return Interval(value, None, None, len(row))
    drawn = row[np.random.default_rng(seed).integers(0, len(row), (resamples, len(row)))]
    low, high = np.quantile(summary(drawn), _ends())
    return Interval(value, float(low), float(high), len(row))


def band(curves: Sequence[Sequence[float]] | Array, *, resamples: int = RESAMPLES, seed: int = SEED) -> Band:
    """The mean curve of runs and its bootstrap interval at each step: `curves` [R][T], NaN where a run has no value.

    Whole runs are resampled, so the values of one run stay together. A run without a value at a step does not count there.
    """
    values = np.asarray(curves, dtype=np.float64)
    there = np.isfinite(values)
    runs = there.sum(axis=0)
    filled = np.where(there, values, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = filled.sum(axis=0) / runs
    low = high = np.full(values.shape[1], np.nan)
    if len(values) > 1:
        rng = np.random.default_rng(seed)
        # How often each resample contains each run. A resample's mean is then a weighted mean: [B, R] @ [R, T].
        times = rng.multinomial(len(values), [1 / len(values)] * len(values), size=resamples).astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            means = (times @ filled) / (times @ there.astype(np.float64))
        if np.isfinite(means).all():
            low, high = np.quantile(means, _ends(), axis=0)
        else:  # a resample may lack every run that reached a step
            with np.errstate(invalid="ignore"):
                low, high = np.nanquantile(np.where(runs > 1, means, 0.0), _ends(), axis=0)
        low, high = (np.where(runs > 1, end, np.nan) for end in (low, high))
    return Band(mean, low, high, runs)


def _ends() -> tuple[float, float]:
    return (1 - LEVEL) / 2, 1 - (1 - LEVEL) / 2
