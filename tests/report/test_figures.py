"""Figures of comparisons and studies: what is drawn where."""

from dataclasses import replace
from statistics import median

import pytest
from matplotlib.ticker import EngFormatter

from phantom_parallel.report import figures as drawings
from phantom_parallel.report.figures import label_axis, line_styles, new_figure, strategy_style
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


def test_lines_of_one_strategy_have_its_colour_and_differ():
    styles = line_styles(["tensor", "tensor+int8", "tensor@2x2", "phantom", "dense model"])
    assert {styles[name]["color"] for name in ("tensor", "tensor+int8", "tensor@2x2")} == {strategy_style("tensor")[0]}
    assert len({(style["color"], style["marker"]) for style in styles.values()}) == 5
    assert styles["dense model"]["color"] == strategy_style("copies")[0]


def test_axes_have_units_and_are_logarithmic_over_wide_ranges():
    _, axes = new_figure("title")
    label_axis(axes, "y", "seconds", [0.01, 1.0])
    assert axes.get_yscale() == "log"
    assert isinstance(axes.yaxis.get_major_formatter(), EngFormatter)
    assert axes.yaxis.get_major_formatter()(0.02) == "20 ms"
    label_axis(axes, "x", "loss", [0.5, 0.6])
    assert axes.get_xscale() == "linear"


def test_a_figure_is_the_same_each_time_and_holds_text():
    first, second = (drawn(make_results())["loss-time"] for _ in range(2))
    assert first.svg == second.svg
    assert ">held-out loss</text>" in first.svg


def test_runs_without_steps_are_left_out():
    results = make_results(seeds=1)
    diverged = replace(make_run("tensor", 0), status="diverged", steps=0, loss=None, curve=())
    cells = (results.cells[0], replace(results.cells[1], runs=(diverged,)))
    assert "tensor" not in lines(drawn(replace(results, cells=cells))["loss-time"])
