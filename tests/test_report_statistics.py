"""Interquartile means, their stratified bootstrap intervals, and bands over seeds, against code written without numpy."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import numpy as np
import pytest

from rlx.report.statistics import Band, band, iqm, iqm_interval


def trimmed_mean(scores: list[float]) -> float:
    """The mean without the lowest and the highest quarter, rounded down."""
    cut = math.floor(len(scores) / 4)
    return statistics.fmean(sorted(scores)[cut : len(scores) - cut])


@pytest.mark.parametrize("count", range(1, 14))
def test_an_iqm_is_the_mean_of_the_middle_half(count: int) -> None:
    draws = random.Random(count)
    scores = [draws.gauss(0, 1) for _ in range(count)]
    assert iqm(np.array(scores)) == pytest.approx(trimmed_mean(scores), rel=1e-12)


def test_one_run_that_diverged_does_not_move_an_iqm() -> None:
    assert iqm(np.array([0.9, 0.91, 0.92, 0.93])) == pytest.approx(iqm(np.array([-1e6, 0.91, 0.92, 0.93])), abs=0.02)


def exact_interval(strata: list[list[float]]) -> tuple[float, float]:
    """Both ends from all equally likely resamples, instead of some drawn at random."""
    resamples = itertools.product(*(itertools.product(stratum, repeat=len(stratum)) for stratum in strata))
    found = sorted(trimmed_mean([score for part in parts for score in part]) for parts in resamples)
    return found[math.floor(0.025 * len(found))], found[math.floor(0.975 * len(found))]


@pytest.mark.parametrize("strata", [[[0.1, 0.2, 0.4, 0.8, 0.9]], [[0.1, 0.5, 0.9], [2.0, 2.1, 2.6]], [[0.3, 0.7], [5.0, 5.5, 5.1, 5.9]]])
def test_the_interval_is_that_of_all_resamples_inside_each_stratum(strata: list[list[float]]) -> None:
    found = iqm_interval(strata, resamples=20_000)
    assert found.value == pytest.approx(trimmed_mean([score for stratum in strata for score in stratum]))
    assert found.low is not None
    assert found.high is not None
    width = found.high - found.low
    assert (found.low, found.high) == pytest.approx(exact_interval(strata), abs=0.06 * width)
    assert found.runs == sum(map(len, strata))


def test_strata_are_not_mixed_by_resampling() -> None:
    apart = [[0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
    fixed, mixed = iqm_interval(apart), iqm_interval([[*apart[0], *apart[1]]])
    assert (fixed.low, fixed.high) == (0.5, 0.5)
    assert mixed.low is not None
    assert mixed.low < 0.2


def test_a_single_run_has_no_interval_and_none_is_an_error() -> None:
    assert iqm_interval([[0.5]]).low is None
    assert iqm_interval([[0.5], [0.7]]).high is None, "one run in each stratum says nothing about the spread of runs"
    with pytest.raises(ValueError, match="no runs"):
        iqm_interval([[], []])


def test_a_band_is_the_bootstrap_of_the_mean_at_each_step() -> None:
    curves = [[0.0, 1.0, 5.0], [1.0, 2.0, 5.0], [4.0, 2.0, 5.0], [2.0, 9.0, 5.0]]
    found = band(curves, resamples=20_000)
    for step in range(3):
        column = [curve[step] for curve in curves]
        means = sorted(statistics.fmean(each) for each in itertools.product(column, repeat=4))
        ends = means[math.floor(0.025 * len(means))], means[math.floor(0.975 * len(means))]
        assert found.mean[step] == pytest.approx(statistics.fmean(column))
        assert (found.low[step], found.high[step]) == pytest.approx(ends, abs=0.26), "the distribution is in steps of a quarter"
    assert found.low[2] == found.high[2] == 5.0


def test_a_band_ends_where_one_run_is_left() -> None:
    nan = float("nan")
    found: Band = band([[1.0, 2.0, 3.0, nan], [3.0, 4.0, nan, nan]])
    assert found.runs.tolist() == [2, 2, 1, 0]
    assert found.mean[:3].tolist() == [2.0, 3.0, 3.0]
    assert np.isnan(found.mean[3])
    assert found.low[:2].tolist() == [1.0, 2.0]
    assert found.high[:2].tolist() == [3.0, 4.0]
    assert np.isnan(found.low[2:]).all()
