"""Figures of comparisons and studies: what is drawn where."""

from itertools import combinations
from statistics import median

import pytest
from matplotlib.text import Text

from phantom_parallel.report import figures as drawings
from tests.study.sample import (
    NATURE,
    STUDIES,
    make_ghosts,
    make_links,
    make_results,
    make_scaling,
    make_smaller,
)


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


def test_names_stand_at_their_curves_and_apart_from_each_other():
    """Also those of many curves that end at nearly the same place."""
    figure = drawn(make_results(tuple(NATURE)))["loss-time"]
    figure.svg  # noqa: B018 (draws it)
    axes = figure.figure.axes[0]
    names = {text.get_text(): text for text in axes.texts if text.get_text() in NATURE}
    assert set(names) == set(NATURE)
    boxes = [Text.get_window_extent(text) for text in names.values()]  # without the line to the end of the curve
    for first, second in combinations(boxes, 2):
        assert not first.padded(-1).overlaps(second.padded(-1))
    for name, text in names.items():
        assert text.xy == pytest.approx(tuple(lines(figure)[name].get_xydata()[-1]))
    assert axes.get_xscale() == axes.get_yscale() == "log"


def test_tuning_has_a_figure_a_measure_with_a_line_for_each_number_of_blocks():
    def row(blocks, ghosts, mean):
        ratio = {"mean": mean, "low": 0.9 * mean, "high": 1.2 * mean, "count": 3}
        return {"blocks": blocks, "ghosts": ghosts, "steps_ratio": ratio, "time_ratio": ratio, "energy_ratio": None}

    rows = [row(2, 8, 1.0), row(2, 4, 2.0), row(4, 8, 1.5)]
    small = {"steps_ratio": {"mean": 3.0}}
    made = {figure.name: figure for figure in drawings.tuning({"candidates": rows, "small_dense": small})}
    assert list(made) == ["ghosts-steps", "ghosts-time"]
    (first, second), levels = made["ghosts-steps"].figure.axes[0].containers, made["ghosts-steps"].figure.axes[0].lines
    assert first.lines[0].get_xydata().tolist() == [[4, 2.0], [8, 1.0]]
    assert second.lines[2][0].get_segments()[0][:, 1] == pytest.approx([1.35, 1.8])
    assert {"dense", "small-dense"} <= {line.get_label() for line in levels}


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
    assert "energy-rank-hours" in scaling
    links = drawn(make_links((("loopback", 64), ("100mbit", 64))))["link-seconds"]
    assert [label.get_text() for label in links.figure.axes[0].get_xticklabels()] == ["loopback", "100mbit"]
    assert list(lines(links)["tensor"].get_ydata()) == [1.0, 12.0]
    both = drawn(make_links())["link-seconds"]
    assert {"phantom (batch 64)", "phantom (batch 512)"} <= lines(both).keys()
    assert list(lines(drawn(make_smaller())["ranks-joules"])["phantom"].get_xdata()) == [1]  # two ranks missed the loss
