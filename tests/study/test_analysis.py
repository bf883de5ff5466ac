"""Intervals against figures worked out by hand."""

import math

import pytest

from phantom_parallel.study.analysis import mean_interval, ratio_interval


def test_the_interval_of_three_values():
    # mean 2, standard deviation 1, t(0.975, 2) = 4.303: 4.303 / sqrt(3) = 2.484
    found = mean_interval([1.0, 2.0, 3.0])
    assert (found.mean, found.count) == (2.0, 3)
    assert found.low == pytest.approx(2.0 - 2.4843, abs=1e-3)
    assert found.high == pytest.approx(2.0 + 2.4843, abs=1e-3)


def test_the_interval_of_many_values_is_no_narrower_than_the_tables_last():
    found = mean_interval([0.0, 1.0] * 20)
    assert found.high - found.mean == pytest.approx(2.131 * math.sqrt(10 / 39) / math.sqrt(40), rel=1e-3)


def test_one_value_has_no_interval_and_nothing_has_no_mean():
    found = mean_interval([5.0])
    assert (found.mean, found.low, found.high, found.count) == (5.0, None, None, 1)
    assert mean_interval([]) is None
    assert ratio_interval([]) is None


def test_a_ratio_is_the_geometric_mean_of_pairs():
    found = ratio_interval([(1.0, 2.0), (2.0, 1.0)])
    assert found.mean == pytest.approx(1.0)
    # logs -ln 2 and ln 2: standard deviation sqrt(2) ln 2, t(0.975, 1) = 12.706
    assert found.high == pytest.approx(math.exp(12.706 * math.log(2)))
    assert found.low == pytest.approx(math.exp(-12.706 * math.log(2)))
    assert ratio_interval([(3.0, 4.0)]).mean == pytest.approx(0.75)


def test_equal_pairs_have_a_ratio_without_doubt():
    found = ratio_interval([(1.0, 4.0), (2.0, 8.0), (0.5, 2.0)])
    assert (found.low, found.mean, found.high) == pytest.approx((0.25, 0.25, 0.25))


def test_intervals_of_quantities_are_clipped_to_what_they_can_be():
    # mean 0.4, standard deviation 0.4, t(0.975, 2) = 4.303: 0.4 + 4.303 * 0.4 / sqrt(3) = 1.39
    found = mean_interval([0.0, 0.4, 0.8])
    assert (found.low, found.high) == pytest.approx((-0.594, 1.394), abs=1e-3)
    clipped = found.clipped(0.0, 1.0)
    assert (clipped.low, clipped.mean, clipped.high, clipped.count) == (0.0, found.mean, 1.0, 3)
    assert mean_interval([5.0]).clipped(0.0, 1.0) == mean_interval([5.0])
