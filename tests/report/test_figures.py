import itertools
import math
import re
from dataclasses import replace
from statistics import median

import pytest

from phantom_parallel.report import captions
from phantom_parallel.report import compare_figures as drawings
from phantom_parallel.report import study_figures as sweeps
from phantom_parallel.report.plots import (
    LogTicks,
    TickFormatter,
    add_grid_and_legend,
    distinct_looks,
    line_style,
    new_figure,
    strategy_style,
)
from phantom_parallel.study.results import Ratio, Trial
from tests.study.sample import make_cell, make_comparison, make_run, make_study, one_ratio


def captions_of(drawn):
    return {drawing.name: drawing.caption for drawing in drawn}


def test_a_comparison_has_all_its_figures():
    drawn = drawings.comparison_figures(make_comparison())
    assert [drawing.name for drawing in drawn] == [
        "loss-time",
        "loss-energy",
        "ratios",
        "learning-rates",
        "parts",
        "bytes",
        "flops",
    ]
    for drawing in drawn:
        assert drawing.caption.endswith(".")
        axes = drawing.figure.axes[0]
        assert axes.get_xlabel()
        assert min(text.get_fontsize() for text in drawing.figure.findobj(match=hasattr_text)) >= 9


def hasattr_text(artist):
    return hasattr(artist, "get_fontsize") and bool(getattr(artist, "get_text", str)())


def test_captions_have_the_numbers_of_the_table():
    found = make_comparison(ratios=(Ratio("phantom", "tensor", "seconds", one_ratio(0.314, 0.28, 0.351)),))
    caption = captions_of(drawings.comparison_figures(found))["loss-time"]
    means = [one.seconds.mean for one in found.strategies]
    assert f"phantom after {means[0]:.2f} s, tensor after {means[1]:.2f} s" in caption
    assert "Phantom takes 0.31 [0.28, 0.35] of tensor's time." in caption
    assert "worse" not in caption


def test_a_comparison_in_which_phantom_is_worse_says_so():
    found = make_comparison(slower=5.0)
    said = captions_of(drawings.comparison_figures(found))
    ratio = next(one.ratio.mean for one in found.ratios if (one.to, one.measure) == ("tensor", "seconds"))
    assert ratio > 1
    assert f"Phantom takes {ratio:.2f}" in said["loss-time"]
    assert "times tensor's time, so phantom is worse here" in said["loss-time"]
    assert "worse" in said["loss-energy"]
    assert "Phantom is worse in time to the loss (tensor)" in said["ratios"]
    assert any("worse" in sentence for sentence in captions.headline(found))


def test_an_interval_that_holds_1_is_no_gain():
    text = captions.share_of("phantom", "tensor", "joules", one_ratio(0.97, 0.9, 1.05))
    assert (
        text
        == "phantom uses 0.97 [0.90, 1.05] of tensor's modelled energy, which may be chance (the interval includes 1)"
    )


def test_a_strategy_that_missed_the_target_is_named():
    found = make_comparison(missed=("tensor",))
    assert "tensor never (missed)" in captions_of(drawings.comparison_figures(found))["loss-time"]
    assert captions.headline(found)[0].startswith("Tensor reached the loss in 0 of 3 runs")


def test_the_figure_of_ratios_says_how_many_have_an_interval_and_whether_they_are_at_equal_loss():
    caption = captions_of(drawings.comparison_figures(make_comparison()))["ratios"]
    assert "12 of 12 ratios are there. 10 have a 95 % interval, of which 10 lie wholly there." in caption
    assert "equal loss" not in caption
    caption = captions_of(drawings.comparison_figures(make_comparison(seeds=1)))["ratios"]
    assert "12 of 12 ratios are there. None has an interval." in caption
    caption = captions_of(drawings.comparison_figures(make_comparison(missed=("phantom",))))["ratios"]
    assert caption.endswith("Phantom never reached the loss: none of these ratios is at equal loss.")
    caption = captions_of(drawings.comparison_figures(make_comparison(missed=("tensor",))))["ratios"]
    assert caption.endswith("Without ratios at equal loss, which was never reached: tensor.")


def test_there_is_no_average_of_one_seed():
    assert "on average over seeds" in captions.to_the_loss(make_comparison(), "seconds")
    assert "average" not in captions.to_the_loss(make_comparison(seeds=1), "seconds")


def test_equal_values_are_the_same_and_no_chance():
    for ratio in (one_ratio(1.0, 1.0, 1.0), one_ratio(1.0, None, None)):
        text = captions.share_of("phantom", "copies", "flops_per_step", ratio)
        assert text == "phantom does the same FLOPs per step as copies"


def test_the_headline_of_strategies_without_phantom_says_who_needs_least():
    findings = ("Least time to the loss: megatron is first.",)
    assert captions.headline(make_comparison(("tensor", "megatron"), ratios=(), findings=findings)) == list(findings)
    (alone,) = captions.headline(make_comparison(("tensor",), ratios=()))
    assert alone.startswith("To a held-out loss of 0.05, on average over seeds: tensor after 3.7")


def test_the_headline_has_measured_energy_where_there_is_some():
    ratios = tuple(Ratio("phantom", "tensor", name, one_ratio(0.5, 0.4, 0.6)) for name in ("joules", "measured_joules"))
    (said,) = captions.headline(make_comparison(ratios=ratios))
    assert "0.50 [0.40, 0.60] of tensor's modelled energy; phantom uses 0.50 [0.40, 0.60] of tensor's measured" in said


def test_counts_are_compared():
    caption = captions_of(drawings.comparison_figures(make_comparison()))["bytes"]
    assert "phantom 65.5 kB, tensor 4,190 kB, megatron 2,100 kB" in caption  # in one unit
    assert "Phantom exchanges 0.016 of tensor's" in caption  # 65,536 / 4,194,304 = 1 / 64


def test_parts_of_a_step_add_up_to_it():
    run = make_run("tensor", 1)
    compute, blocked, idle = drawings.step_breakdown(run)
    assert compute + blocked + idle == pytest.approx(run.step_seconds)
    assert blocked == pytest.approx(0.55 * 0.95 * run.step_seconds)
    assert idle == pytest.approx(0.05 * run.step_seconds)


def test_a_step_that_is_not_split_has_no_parts():
    assert drawings.step_breakdown(replace(make_run("tensor", 1), compute_seconds=None, blocked_seconds=None)) is None


def test_the_median_way_down_goes_as_far_as_half_of_the_seeds():
    quick = [(0.0, 1.0), (1.0, 0.5), (2.0, 0.25)]
    slow = [(0.0, 1.0), (2.0, 0.5), (4.0, 0.25)]
    stuck = [(0.0, 1.0), (3.0, 0.5)]
    assert drawings.median_curve([quick, slow, stuck], 0.25) == [(0.0, 1.0), (2.0, 0.5), (4.0, 0.25)]
    assert drawings.median_curve([quick, stuck], 0.25)[-1] == (2.0, 0.5)  # between 1 and 3; one in two goes on
    between = drawings.median_curve([quick, [(0.0, 1.0), (1.0, 0.75)], [(0.0, 1.0), (9.0, 0.75)]], 0.25)
    assert between[-1] == (1.0, 0.75)  # of 0.5, 1 and 9 seconds


def test_the_median_way_down_ends_at_the_median_time_to_the_target():
    """Runs stop at the first evaluation below the target: how far below says nothing of the others."""
    seeds = [
        [(0.0, 1.0), (2.0, 0.4), (3.0, 0.1)],
        [(0.0, 1.0), (4.0, 0.3), (5.0, 0.19)],
        [(0.0, 1.0), (7.0, 0.25), (8.0, 0.15)],
    ]
    typical = drawings.median_curve(seeds, 0.2)
    assert typical[-1] == (5.0, 0.2)
    assert all(before < after for (before, _), (after, _) in itertools.pairwise(typical))
    found = make_comparison()
    axes = drawings.comparison_figures(found)[0].figure.axes[0]
    ends = [line.get_xydata()[0] for line in axes.lines if line.get_markersize() == 8]
    times = [median(run.seconds for run in found.runs if run.strategy == one.strategy) for one in found.strategies]
    assert [x for x, _ in ends] == pytest.approx(times)
    assert [y for _, y in ends] == [found.target_loss] * 3


def test_the_search_says_where_it_ended_at_an_edge():
    found = make_comparison()
    assert "0.004 of 4 for phantom" in captions.learning_rates(found)
    assert "an end" not in captions.learning_rates(found)
    fewer = make_comparison(trials=tuple(trial for trial in found.trials if trial.lr <= 0.004))
    assert "0.004 of 3 for phantom, an end of the rates tried" in captions.learning_rates(fewer)
    assert captions.learning_rates(fewer).count("an end") == 1


def test_a_search_for_the_target_is_drawn_by_its_steps():
    trials = (
        Trial("phantom", 0.001, "target", 80, 0.05),
        Trial("phantom", 0.002, "target", 60, 0.05, chosen=True),
        Trial("phantom", 0.004, "steps", 60, 0.07),
    )
    drawing = captions_of(drawings.comparison_figures(make_comparison(trials=trials)))["learning-rates"]
    assert "could no longer be the best" in drawing
    axes = drawings.comparison_figures(make_comparison(trials=trials))[3].figure.axes[0]
    assert "steps to the loss" in axes.get_ylabel()
    line = next(line for line in axes.lines if line.get_label() == "phantom")
    assert [*zip(*line.get_data(), strict=True)] == [(0.001, 80), (0.002, 60)]


def test_missing_values_leave_figures_out():
    found = make_comparison(trials=(), ratios=(), runs=())
    assert [drawing.name for drawing in drawings.comparison_figures(found)] == ["bytes", "flops"]
    assert sweeps.study_figures(make_study("ghosts", cells=())) == []
    assert sweeps.study_figures(make_study("smaller", cells=())) == []


def test_files_of_a_figure_are_the_same_each_time_and_hold_text():
    first, second = (drawings.comparison_figures(make_comparison())[0] for _ in range(2))
    assert first.svg == second.svg
    assert ">held-out loss</text>" in first.svg
    assert first.png.startswith(b"\x89PNG")


def test_names_with_mathematics_in_them_are_text():
    cells = [make_cell("$x", {"loss": loss}, width=width) for width, loss in ((1, 0.5), (2, math.nan), (3, 0.2))]
    (drawing,) = sweeps.study_figures(make_study("mine", cells=tuple(cells)))
    assert re.search(r">\$x<", drawing.svg)


def test_many_strategies_have_a_row_each_in_the_figure_of_ratios():
    found = make_comparison(("phantom", "phantom-copies", "tensor", "megatron", "copies", "tensor+int8"))
    drawn = {drawing.name: drawing for drawing in drawings.comparison_figures(found)}
    axes = drawn["ratios"].figure.axes[0]
    assert axes.get_yticklabels()[0].get_text() == "to phantom-copies"
    assert len(axes.get_yticks()) == 5
    assert drawn["ratios"].figure.get_figheight() < 8
    assert "Phantom takes" in drawn["loss-time"].caption
    assert "copies's" not in drawn["loss-time"].caption  # shares of the baselines alone
    assert "of 10 ratios are there" in drawn["ratios"].caption  # those that are drawn: five strategies, time and energy


def test_a_strategy_keeps_its_colour_whatever_it_exchanges():
    assert strategy_style("tensor+int8") == strategy_style("tensor@2x2") == strategy_style("tensor")
    assert line_style("tensor+int8") != line_style("tensor")
    assert strategy_style("phantom-copies") != strategy_style("phantom")
    assert strategy_style("dense model") == strategy_style("copies")


def test_layouts_of_one_strategy_are_told_apart():
    names = (
        "tensor",
        "tensor@4x1",
        "tensor@2x2",
        "tensor@1x4",
        "tensor+int8",
        "phantom",
        "phantom@2x2",
        "dense",
        "copies",
    )
    looks = distinct_looks(names)
    assert len(set(looks.values())) == len(names)
    assert {looks[name].colour for name in names[:5]} == {strategy_style("tensor")[0]}
    assert (looks["tensor"].colour, looks["tensor"].marker) == strategy_style("tensor")


def test_curves_that_end_far_apart_have_a_logarithmic_axis_which_says_so():
    def axis_of(factor):
        found = make_comparison(("phantom", "tensor"))
        runs = tuple(_slower(run, factor if run.strategy == "tensor" else 1) for run in found.runs)
        axes = drawings.comparison_figures(replace(found, runs=runs))[0].figure.axes[0]
        return axes.get_xscale(), axes.get_xlabel(), axes.get_xlim()

    scale, label, (low, _) = axis_of(2)  # from 1.2 to 7 seconds
    assert (scale, label, low) == ("linear", "time, s", 0)
    scale, label, (low, _) = axis_of(40)
    assert scale == "log"
    assert "logarithmic" in label
    assert low > 0


def _slower(run, factor):
    curve = tuple(replace(point, seconds=factor * point.seconds) for point in run.curve)
    return replace(run, seconds=factor * run.seconds, curve=curve)


def test_numbers_beside_points_and_bars_have_the_unit_of_the_axis():
    for drawing in drawings.comparison_figures(make_comparison(("phantom", "tensor", "megatron", "copies"))):
        if drawing.name in ("parts", "bytes", "flops"):
            axes = drawing.figure.axes[0]
            units = {text.get_text().split()[-1] for text in axes.texts}
            assert units == {axes.get_xlabel().split()[-1]}, drawing.name


def test_crosses_of_many_searches_leave_the_axis_to_the_points():
    names = [f"tensor@1x{number}" for number in range(1, 13)]
    trials = tuple(Trial(name, lr, "steps", 100, 0.2, chosen=lr == 0.002) for name in names for lr in (0.001, 0.002))
    trials += tuple(Trial(name, 0.004, "diverged", 40, None) for name in names)
    (axes,) = next(
        drawing.figure.axes
        for drawing in drawings.comparison_figures(
            make_comparison(trials=(*trials, Trial("x", 0.001, "steps", 1, 0.1)))
        )
        if drawing.name == "learning-rates"
    )
    assert axes.get_ylim()[1] < 1  # of losses of 0.1 and 0.2
    rows = sorted({line.get_ydata()[0] for line in axes.lines if line.get_marker() == "x"})
    assert len(rows) == len(names)
    highest = axes.transAxes.inverted().transform(axes.transData.transform((0.001, 0.2)))[1]
    assert highest < rows[0]


def test_ticks_of_the_figure_of_ratios_do_not_touch():
    ratios = [Ratio("phantom", "tensor", name, one_ratio(0.5, 0.03, 1.01)) for name in ("seconds", "memory_bytes")]
    ratios += [Ratio("phantom", "tensor", "inference_joules, batch 64", one_ratio(0.6, None, None))]
    found = make_comparison(ratios=tuple(ratios))
    figure = next(drawing.figure for drawing in drawings.comparison_figures(found) if drawing.name == "ratios")
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_xticklabels()]
    assert len(boxes) > 1
    assert all(before.x1 + 4 < after.x0 for before, after in itertools.pairwise(boxes))


def test_a_legend_of_long_names_has_fewer_columns_and_is_not_cut():
    for length in (3, 20, 30):
        figure, axes = new_figure("Names")
        for name in range(5):
            axes.plot([0, 1], label=f"{name} {'m' * length}")
        add_grid_and_legend(figure, axes, columns=4)
        (legend,) = figure.legends
        figure.canvas.draw()
        box = legend.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.width


def test_the_target_is_in_the_legend_where_no_marker_covers_it():
    drawn = {drawing.name: drawing for drawing in drawings.comparison_figures(make_comparison())}
    for name in ("loss-time", "loss-energy"):
        (legend,) = drawn[name].figure.legends
        assert "target 0.05" in [text.get_text() for text in legend.get_texts()]
        assert not list(drawn[name].figure.axes[0].texts)


def test_energy_in_ratios_and_captions_says_that_it_is_modelled():
    found = make_comparison(slower=5.0)
    energy = replace(found.ratios[0], measure="inference_joules, batch 64", ratio=one_ratio(1.2, None, None))
    drawn = {
        drawing.name: drawing for drawing in drawings.comparison_figures(replace(found, ratios=(*found.ratios, energy)))
    }
    rows = [label.get_text() for label in drawn["ratios"].figure.axes[0].get_yticklabels()]
    assert "modelled energy to the loss" in rows
    assert "inference energy per sample, batch 64, modelled" in rows
    assert "inference energy per sample, batch 64, modelled (tensor)" in drawn["ratios"].caption
    assert drawn["loss-energy"].title == "Held-out loss against modelled energy"


def test_models_with_the_same_trials_do_not_hide_each_other():
    trials = [
        Trial(name, lr, status, 60, 0.05, chosen=status == "target")
        for name in ("phantom", "tensor", "megatron")
        for lr, status in ((0.001, "target"), (0.002, "steps"))
    ]
    axes = drawings.comparison_figures(make_comparison(trials=tuple(trials)))[3].figure.axes[0]
    rings = [line.get_markersize() for line in axes.lines if line.get_markerfacecolor() == "none"]
    assert len(rings) == len(set(rings)) == 3
    crosses = [line.get_ydata()[0] for line in axes.lines if line.get_marker() == "x"]
    assert len(crosses) == len(set(crosses)) == 3
    low, high = axes.get_ylim()
    assert math.log(60 / low) / math.log(high / low) < min(crosses) - 0.03  # points stand below the crosses


@pytest.mark.parametrize("ends", [(0.24, 0.2543), (0.2, 1.3), (1e-3, 4.0), (12345.6, 12346.9), (1e-9, 1e9), (3.0, 3.3)])
@pytest.mark.parametrize("gap", [0.15, 0.09])
def test_ticks_of_a_logarithmic_axis_are_apart_and_labels_are_their_values(ends, gap):
    low, high = ends
    ticks = LogTicks(gap).tick_values(low, high)
    assert len(ticks) >= 2
    assert all(low <= tick <= high for tick in ticks)
    shares = [math.log(tick / low) / math.log(high / low) for tick in ticks]
    assert min(after - before for before, after in itertools.pairwise(shares)) >= gap - 1e-9
    labels = [float(label.replace(",", "")) for label in TickFormatter().format_ticks(ticks)]
    assert len(set(labels)) == len(ticks)
    assert labels == pytest.approx(list(ticks), rel=1e-6)


def test_the_label_of_an_axis_names_a_setting_once():
    for setting in ("ghosts", "width", "batch"):
        assert sweeps.axis_label(make_study("ghosts"), setting).lower().count(f"{setting}:") <= 1
    assert "steps to the loss" in drawings.comparison_figures(
        make_comparison(trials=(Trial("phantom", 0.001, "target", 80, 0.05, chosen=True),))
    )[3].figure.axes[0].get_ylabel().split(",")
