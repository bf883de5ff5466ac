"""Figures of comparisons and studies: what is drawn where."""

from dataclasses import replace
from statistics import median

import pytest

from phantom_parallel.report import figures as drawings
from tests.study.sample import STUDIES, make_ghosts, make_links, make_results, make_run, make_scaling, make_smaller


def drawn(results):
    return {figure.name: figure for figure in drawings.figures(results)}


def lines(figure):
    return {line.get_label(): line for line in figure.figure.axes[0].lines}


def test_a_comparison_has_all_its_figures():
    comparison = drawn(make_results())
    assert list(comparison) == ["loss-time", "loss-energy"]
    for figure in comparison.values():
        assert figure.caption
        assert figure.figure.axes[0].get_xlabel()
        texts = figure.figure.findobj(lambda artist: hasattr(artist, "get_fontsize") and artist.get_text())
        assert min(text.get_fontsize() for text in texts) >= 9
    assert list(drawn(make_results(trials=(), cells=()))) == []


def test_curves_end_at_the_median_time_to_the_target():
    results = make_results()
    curves = lines(drawn(results)["loss-time"])
    for cell in results.cells:
        x, y = curves[cell.strategy].get_xydata()[-1]
        assert (x, y) == pytest.approx((median(run.seconds for run in cell.runs), results.target_loss))


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_has_figures_with_lines(name):
    for figure in drawn(STUDIES[name]()).values():
        assert len(figure.figure.axes[0].lines) > 1


def test_the_lines_of_studies():
    ghosts = drawn(make_ghosts())["ghosts-loss"]
    assert list(lines(ghosts)["phantom"].get_xdata()) == [2, 4, 8, 16]
    assert set(lines(ghosts)["tensor"].get_ydata()) == {0.053}  # a horizontal line: it has no ghosts
    scaling = drawn(make_scaling())
    assert list(lines(scaling["ranks-step-seconds"])["tensor"].get_xdata()) == [1, 2, 4]
    assert list(lines(scaling["ranks-step-seconds-modelled"])["tensor"].get_xdata()) == [16, 64]
    links = drawn(make_links((("loopback", 64), ("100mbit", 64))))["link-seconds"]
    assert [label.get_text() for label in links.figure.axes[0].get_xticklabels()] == ["loopback", "100mbit"]
    assert list(lines(links)["tensor"].get_ydata()) == [1.0, 12.0]
    both = drawn(make_links())["link-seconds"]
    assert {"phantom (batch 64)", "phantom (batch 512)"} <= lines(both).keys()
    assert list(lines(drawn(make_smaller())["ranks-joules"])["phantom"].get_xdata()) == [1]  # two ranks missed the loss


def test_a_figure_is_the_same_each_time_and_holds_text():
    first, second = (drawn(make_results())["loss-time"] for _ in range(2))
    assert first.svg == second.svg
    assert ">held-out loss</text>" in first.svg


def test_runs_without_steps_are_left_out():
    results = make_results(seeds=1)
    diverged = replace(make_run("tensor", 0), status="diverged", steps=0, loss=None, curve=())
    cells = (results.cells[0], replace(results.cells[1], runs=(diverged,)))
    assert "tensor" not in lines(drawn(replace(results, cells=cells))["loss-time"])
