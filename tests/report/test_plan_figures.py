"""The figures of a plan: legends that are whole, and a warning where phantom stands beside the dense model."""

import pytest

from phantom_parallel.cost.hardware import load_profile
from phantom_parallel.cost.planner import PlanRequest, plan, scaling
from phantom_parallel.families.ffn.sizes import FFNSizes
from phantom_parallel.report import plan_figures

WARNING = "phantom is another, smaller model than the dense one: its loss is not compared here"


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draw both figures of a plan, and return them as matplotlib has them."""
    figures = []
    monkeypatch.setattr(plan_figures, "save", lambda figure, stem: figures.append(figure) or [])

    def draw(**changes):
        request = PlanRequest(
            model=FFNSizes(width=16384, depth=8), batch=256, devices=64, profile=load_profile("dgx-a100"), **changes
        )
        plan_figures.draw_scaling(request, scaling(request), tmp_path)
        plan_figures.draw_tradeoff(plan(request), tmp_path)
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


def test_the_title_says_that_phantom_is_another_model_unless_its_ghosts_are_known_to_suffice(drawn):
    for figure in drawn():
        assert WARNING in figure.get_suptitle()
    for figure in drawn(min_ghosts=16)[2:]:
        assert "another" not in figure.get_suptitle()
    for figure in drawn(strategies=("tensor", "megatron"))[4:]:
        assert "another" not in figure.get_suptitle()
