"""Figures of comparisons and studies: what is drawn where."""

from itertools import combinations
from statistics import median

import numpy as np
import pytest
from matplotlib.text import Text

from phantom_parallel.report import figures as drawings
from tests.study.sample import (
    NATURE,
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


def write_fields(folder, points, errors):
    """Fields of a wave and its input, which each model predicts with an error, in the form that comparisons keep."""
    solution = np.stack([1 + np.sin(points @ (3.0, 1.0)), 2 + np.cos(points @ (1.0, 2.0))])
    (folder / "fields").mkdir()
    for model, error in errors.items():
        arrays = {"points": points, "source": 10 * solution, "solution": solution, "prediction": solution + error}
        np.savez(folder / "fields" / f"{model}.npz", **arrays)
    return solution


def test_fields_on_a_grid_are_drawn_where_their_points_are(tmp_path):
    """In whatever order the features are."""
    side = 5
    points = np.stack(np.meshgrid(*2 * [np.arange(side) / side], indexing="ij"), -1).reshape(-1, 2)
    points = points[np.random.default_rng(0).permutation(side**2)]
    solution = write_fields(tmp_path, points, {"dense": 0.1, "phantom": -0.2})
    first, second = drawings.field_figures(tmp_path)
    for row, made in enumerate((first, second)):
        panels = {axes.get_title(): axes for axes in made.figure.axes if axes.images}
        assert " ".join(panels) == "solution phantom predicts dense predicts source phantom error dense error"
        images = {title: axes.images[0] for title, axes in panels.items()}
        for point, value in zip(points, solution[row], strict=True):
            x, y = (side * point).round().astype(int)
            assert images["solution"].get_array()[y, x] == value
            assert images["source"].get_array()[y, x] == 10 * value
            assert images["phantom error"].get_array()[y, x] == pytest.approx(-0.2)
        assert images["solution"].origin == "lower"
        assert len({images[title].get_clim() for title in images if "predicts" in title or title == "solution"}) == 1
        assert images["phantom error"].get_clim() == images["dense error"].get_clim() == pytest.approx((-0.2, 0.2))
        for model, error in (("phantom", 0.2), ("dense", 0.1)):
            share = error * side / np.linalg.norm(solution[row])
            assert f"{model} {100 * share:.1f} %" in made.caption


def test_fields_on_a_mesh_are_drawn_by_its_points(tmp_path):
    points = np.random.default_rng(0).uniform(size=(16, 2))  # as many as a grid could have
    solution = write_fields(tmp_path, points, {"phantom": 0.5})
    drawn = drawings.field_figures(tmp_path)[1].figure.axes[0].collections[0]
    np.testing.assert_array_equal(drawn.get_array(), solution[1])
    assert drawn.get_rasterized()
    texts = drawings.field_figures(tmp_path)[0].figure.findobj(lambda artist: hasattr(artist, "get_fontsize"))
    assert min(text.get_fontsize() for text in texts if text.get_text()) >= 9
    assert drawings.field_figures(tmp_path / "nowhere") == []


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
