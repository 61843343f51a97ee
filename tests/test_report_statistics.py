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


@pytest.mark.parametrize("scores", [[0.1, 0.2, 0.4, 0.8, 0.9], [0.1, 0.5, 0.9, 2.0, 2.1, 2.6]])
def test_the_interval_is_that_of_all_resamples(scores: list[float]) -> None:
    found = iqm_interval(scores, resamples=20_000)
    assert (found.value, found.runs) == (pytest.approx(trimmed_mean(scores)), len(scores))
    every = sorted(trimmed_mean(drawn) for drawn in itertools.product(scores, repeat=len(scores)))
    low, high = every[math.floor(0.025 * len(every))], every[math.floor(0.975 * len(every))]
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.06 * (high - low))


def test_a_single_run_has_no_interval_and_none_is_an_error() -> None:
    assert iqm_interval([0.5]).low is None
    with pytest.raises(ValueError, match="no scores"):
        iqm_interval([])


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
