"""The figures of a plan: legends that are whole, and a warning where phantom stands beside the dense model."""

import csv

import pytest

from phantom_parallel.cost.hardware import load_profile
from phantom_parallel.cost.planner import ModelSizes, PlanRequest, scaling
from phantom_parallel.report import figures as drawings

WARNING = "phantom is another, smaller model than the dense one: its loss is not compared here"


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draw the figure of a plan, and return all that were drawn as matplotlib has them."""
    figures = []
    monkeypatch.setattr(drawings, "save", lambda figure, stem: figures.append(figure) or [])

    def draw(**changes):
        request = PlanRequest(
            model=ModelSizes("ffn", {"width": 16384, "depth": 8}),
            batch=256,
            devices=64,
            profile=load_profile("dgx-a100"),
            **changes,
        )
        drawings.draw_scaling(request, scaling(request), tmp_path)
        return figures

    return draw


def test_legends_are_within_the_figure(drawn):
    for figure in drawn():
        figure.canvas.draw()
        (legend,) = figure.legends
        box = legend.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.width
        assert len(legend.get_texts()) > 5


def test_values_can_be_read_off_every_axis(drawn):
    for figure in drawn():
        figure.canvas.draw()
        for axes in figure.axes:
            for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
                assert axis.get_scale() == "log"
                places = axis.get_majorticklocs()
                labels = [label.get_text() for label in axis.get_majorticklabels()]
                shown = {at: text for at, text in zip(places, labels, strict=True) if low <= at <= high}
                assert len(shown) >= 3
                for at, text in shown.items():
                    assert float(text.replace(",", "")) == pytest.approx(at)


def test_the_title_says_that_phantom_is_another_model(drawn):
    for figure in drawn():
        assert WARNING in figure.get_suptitle()
    for figure in drawn(strategy=("tensor", "megatron"))[1:]:
        assert "another" not in figure.get_suptitle()


def test_the_points_of_a_conversion_are_in_a_csv_file(tmp_path):
    curves = {"phantom": [(0.8, 2.5), (0.5, 3.0)], "low rank": [(0.5, 3.25)]}
    written = drawings.draw_curve(curves, 2.25, tmp_path / "curve")
    assert sorted(path.name for path in written) == ["curve.csv", "curve.png", "curve.svg"]
    with (tmp_path / "curve.csv").open(newline="") as file:
        rows = [(row["method"], float(row["kept"]), float(row["loss"])) for row in csv.DictReader(file)]
    assert rows == [("dense", 1.0, 2.25), ("phantom", 0.5, 3.0), ("phantom", 0.8, 2.5), ("low rank", 0.5, 3.25)]
