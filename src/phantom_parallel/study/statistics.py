"""Means over seeds with 95 % confidence intervals, and ratios of runs that were made side by side."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from phantom_parallel.study.results import Interval

# Two-sided 95 % points of Student's t for 1, 2, ... degrees of freedom; beyond the table the last one serves, which is
# on the wide side.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def interval(values: Sequence[float]) -> Interval | None:
    """The mean; None of nothing."""
    if not values:
        return None
    mean = fmean(values)
    if len(values) == 1:
        return Interval(mean, None, None, 1)
    half = _half_width(values)
    return Interval(mean, mean - half, mean + half, len(values))


def ratio(pairs: Sequence[tuple[float, float]]) -> Interval | None:
    """The geometric mean of first over second; the interval is that of the logarithms. None of nothing."""
    logs = [math.log(first / second) for first, second in pairs if first > 0 and second > 0]
    if not logs:
        return None
    mean = fmean(logs)
    if len(logs) == 1:
        return Interval(math.exp(mean), None, None, 1)
    half = _half_width(logs)
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


def _half_width(values: Sequence[float]) -> float:
    return _T95[min(len(values) - 1, len(_T95)) - 1] * stdev(values) / math.sqrt(len(values))
