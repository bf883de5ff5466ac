"""The figures of plans and conversions: legends that are whole, and numbers beside them."""

import pytest

from phantom_parallel.cost.hardware import load_profile
from phantom_parallel.cost.planner import ModelSizes, PlanRequest, scaling
from phantom_parallel.report import figures as drawings

WARNING = "phantom is another, smaller model than the dense one: its loss is not compared here"


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draw the figure of a plan, and return it as matplotlib has it."""
    figures = []
    monkeypatch.setattr(drawings, "save", lambda figure, stem: figures.append(figure) or [])

    def draw(**changes):
        sizes, profile = ModelSizes("ffn", {"width": 16384, "depth": 8}), load_profile("dgx-a100")
        request = PlanRequest(model=sizes, batch=256, devices=64, profile=profile, **changes)
        drawings.draw_scaling(request, scaling(request), tmp_path)
        return figures.pop()

    return draw


def test_a_scaling_figure_has_a_whole_legend_readable_axes_and_a_warning(drawn):
    figure = drawn()
    figure.canvas.draw()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
    assert len(legend.get_texts()) > 5
    for axes in figure.axes:
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            assert axis.get_scale() == "log"
            pairs = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
            shown = {at: label.get_text() for at, label in pairs if low <= at <= high}
            assert len(shown) >= 3
            for at, text in shown.items():
                assert float(text.replace(",", "")) == pytest.approx(at)
    assert WARNING in figure.get_suptitle()
    assert "another" not in drawn(strategy=("tensor", "megatron")).get_suptitle()
