"""The figure of a communication profile."""

import pytest

from phantom_parallel.cost.dryrun import profile
from phantom_parallel.report.communication_figures import draw
from tests.cost.test_communication import both
from tests.families.gpt.test_cost import shape_of


def test_the_figure_has_a_panel_for_each_phase():
    figure = draw(both(), "Messages of one rank")
    assert [panel.get_title() for panel in figure.axes] == ["prefill", "decode", "forward", "backward"]
    backward = figure.axes[3]
    heights = sorted(float(point.get_ydata()[0]) for point in backward.lines)
    assert heights[-1] == sum(row.sent_bytes for row in both()["megatron"] if row.phase == "backward")
    assert backward.get_yscale() == "log"
    assert not backward.patches  # a bar's length on a logarithmic axis means nothing
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["phantom, 4 blocks", "megatron", "all-gather", "reduce-scatter", "all-reduce"]


def test_one_rank_has_nothing_to_draw():
    with pytest.raises(ValueError, match="one rank sends nothing"):
        draw({"dense": profile(shape_of("dense", 1))}, "Messages")
