"""Means, ratios and rankings against scipy and against figures worked out by hand."""

import math
from dataclasses import replace
from statistics import fmean

import pytest
from scipy import stats

from phantom_parallel.study import analysis
from phantom_parallel.study.analysis import (
    by_seed,
    energy_fit,
    mean,
    peer,
    ranking,
    ratio,
    ratio_interval,
    ratios,
)
from tests.study.sample import cell_of, make_ghosts, make_links, make_results, make_scaling, make_smaller


@pytest.mark.parametrize("values", [[1.0, 2.0, 3.0], [5.0, 5.5], [0.1 * n + 1 for n in range(40)]])
def test_intervals_are_students(values):
    interval = analysis._interval(values)
    low, high = stats.t.interval(0.95, len(values) - 1, fmean(values), stats.sem(values))
    assert (interval.mean, interval.count) == (pytest.approx(fmean(values)), len(values))
    assert (interval.low, interval.high) == (pytest.approx(low), pytest.approx(high))


def test_one_value_has_no_interval_and_nothing_has_no_mean():
    interval = analysis._interval([5.0])
    assert (interval.mean, interval.low, interval.high, interval.count) == (5.0, None, None, 1)
    assert ratio_interval([(3.0, 4.0)]).mean == pytest.approx(0.75)
    assert analysis._interval([]) is None
    assert ratio_interval([]) is None


def test_a_ratio_is_the_geometric_mean_of_pairs():
    interval = ratio_interval([(1.0, 2.0), (2.0, 1.0)])
    # logs -ln 2 and ln 2: standard deviation sqrt(2) ln 2, t(0.975, 1) = 12.706
    assert interval.mean == pytest.approx(1.0)
    assert interval.high == pytest.approx(math.exp(12.7062 * math.log(2)), rel=1e-4)
    assert interval.low == pytest.approx(math.exp(-12.7062 * math.log(2)), rel=1e-4)
    equal = ratio_interval([(1.0, 4.0), (2.0, 8.0), (0.5, 2.0)])
    assert (equal.low, equal.mean, equal.high) == pytest.approx((0.25, 0.25, 0.25))


def test_means_are_those_of_runs_that_reached_the_loss():
    results = make_results()
    tensor = cell_of(results, "tensor")
    first = replace(tensor.runs[0], status="steps")
    partly = replace(results, cells=(results.cells[0], replace(tensor, runs=(first, *tensor.runs[1:]))))
    reached = [run.seconds for run in tensor.runs[1:]]
    assert mean(partly, partly.cells[1], "seconds").mean == pytest.approx(fmean(reached))
    assert mean(partly, partly.cells[1], "step_seconds").count == 3  # of all runs
    assert mean(results, tensor, "flops").mean == pytest.approx(fmean(run.steps for run in tensor.runs) * 810e6)
    assert mean(results, tensor, "bytes_per_step").mean == 4_194_304
    assert (
        by_seed(make_results(missed=("tensor",)), cell_of(make_results(missed=("tensor",)), "tensor"), "seconds") == {}
    )


def test_ratios_pair_runs_of_the_same_seed():
    results = make_results()
    phantom, tensor = cell_of(results, "phantom"), cell_of(results, "tensor")
    logs = [math.log(each.seconds / other.seconds) for each, other in zip(phantom.runs, tensor.runs, strict=True)]
    assert math.log(ratio(results, phantom, tensor, "seconds").mean) == pytest.approx(fmean(logs))
    assert ratio(results, phantom, tensor, "parameters").mean == pytest.approx(0.62 / 2.1)
    assert ratio(results, phantom, tensor, "latency, batch 64").mean == pytest.approx(0.010 / 0.031)
    missed = make_results(missed=("tensor",))
    assert ratio(missed, missed.cells[0], missed.cells[1], "seconds") is None
    assert ratio(missed, missed.cells[0], missed.cells[1], "step_seconds") is not None
    pairs = {(cell.strategy, other.strategy) for cell, other, _, _ in ratios(results)}
    assert pairs == {("phantom", "tensor"), ("phantom", "megatron"), ("megatron", "tensor")}


def test_who_is_first_is_a_matter_of_intervals():
    results = make_links((("loopback", 64),))
    (first, _), (second, share), *_ = ranking(results, results.cells, "seconds")
    assert (first.strategy, second.strategy, share.mean) == ("tensor", "phantom", pytest.approx(0.5))
    assert not share.includes_one  # the seeds of both differ alike
    close = make_results(slower=2.05, seeds=2)
    assert any(share.includes_one for _, share in ranking(close, close.cells, "seconds")[1:])
    missing = make_links((("100mbit", 512),))
    assert "fsdp" not in [cell.strategy for cell, _ in ranking(missing, missing.cells, "seconds")]


def test_cells_are_compared_with_those_of_the_same_place_or_with_the_reference():
    ghosts = make_ghosts()
    assert peer(ghosts, cell_of(ghosts, "phantom", ghosts=8), "tensor") is ghosts.cells[0]
    links = make_links()
    phantom = cell_of(links, "phantom", batch=512)
    assert peer(links, phantom, "tensor").settings == {"batch": 512}
    assert peer(links, phantom, "tensor").link == "100mbit"
    smaller = make_smaller()
    assert peer(smaller, cell_of(smaller, "phantom", ranks=1), "tensor") is smaller.cells[0]


def test_the_line_of_energy_over_rank_hours():
    results = make_scaling()
    cells = [cell for cell in results.cells if cell.strategy == "tensor"]
    fit = energy_fit(results, "tensor")
    hours = [cell.ranks * cell.runs[0].seconds / 3600 for cell in cells]
    expected = stats.linregress(hours, [cell.runs[0].joules for cell in cells])
    assert fit.watts == pytest.approx(expected.slope / 3600)
    assert (fit.joules, fit.r_squared) == (pytest.approx(expected.intercept), pytest.approx(expected.rvalue**2))
    assert energy_fit(replace(results, cells=tuple(cells[:2])), "tensor") is None
