"""The figures of comparisons and of studies."""

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from phantom_parallel.report.plots import (
    INK,
    MUTED,
    SURFACE,
    CaptionedFigure,
    add_grid_and_legend,
    counted_axis,
    label_axis,
    line_styles,
    log_axis,
    new_figure,
    plot_style,
    strategy_style,
    unit_formatter,
)
from phantom_parallel.study.analysis import lead_of, median_of, ratio
from phantom_parallel.study.notes import main_measure
from phantom_parallel.study.results import Cell, CurvePoint, Results, Run, Trial
from phantom_parallel.study.units import format_measure, format_ratio, measure_label, plain, quantity

_CURVES = (
    "Thin: each seed, to its first evaluation at or below the target. Thick: the median over seeds of what each loss "
    "took, whose end is the median to the target, which half of the seeds or more must reach."
)
_SEARCH = (
    "Learning rates of the same search for every model; the chosen one is ringed. Crosses at the top: diverged, missed "
    "the loss, or could no longer be the best."
)


def figures(results: Results) -> list[CaptionedFigure]:
    """The figures that the results have data for, the most important first."""
    with plot_style():
        drawn = _comparison(results) if results.is_comparison else _study(results)
        drawn.append(_search(results))
    return [figure for figure in drawn if figure is not None]


def _comparison(results: Results) -> list[CaptionedFigure | None]:
    return [
        _ratios(results),
        _curve(results, "seconds"),
        _curve(results, "joules"),
        _parts(results),
        _counts(results, "bytes_per_step"),
        _counts(results, "flops_per_step"),
    ]


def _ratios(results: Results) -> CaptionedFigure | None:
    """Phantom's time and energy as shares of the others', with their intervals."""
    lead = lead_of(results.cells)
    mine = next((cell for cell in results.cells if cell.strategy == lead), None)
    others = [cell for cell in results.cells if cell.strategy != lead]
    measures = [name for name in ("seconds", "joules", "measured_joules") if not results.is_timed]
    measures = measures or ["step_seconds", "joules_per_sample"]
    rows = [
        (row, measure, value)
        for row, cell in enumerate(others)
        for measure in measures
        if mine is not None and (value := ratio(results, mine, cell, measure)) is not None
    ]
    if not rows:
        return None
    title = f"{lead.capitalize()} as a share of the others"
    figure, axes = new_figure(title, 1.5 + 0.45 * len(others))
    looks = dict(zip(measures, ((INK, "o"), (MUTED, "s"), (MUTED, "D")), strict=False))
    for row, measure, value in rows:
        colour, marker = looks[measure]
        at = row + 0.22 * (measures.index(measure) - (len(measures) - 1) / 2)
        low, high = (value.mean if end is None else end for end in (value.low, value.high))
        axes.plot([low, high], [at, at], color=colour, linewidth=1.6, solid_capstyle="butt")
        axes.plot(value.mean, at, color=colour, marker=marker, markersize=6, linestyle="none")
        _beside(axes, (1, at), format_ratio(value.mean), xycoords=("axes fraction", "data"))
    for measure in dict.fromkeys(measure for _, measure, _ in rows):
        colour, marker = looks[measure]
        axes.plot([], [], color=colour, marker=marker, linewidth=1.6, label=measure_label(measure))
    axes.axvline(1, color=INK, linewidth=1.2)
    log_axis(axes, "x")
    axes.set_xlabel("ratio, 95 % interval")
    _strategy_rows(axes, [f"to {cell.strategy}" for cell in others])
    add_grid_and_legend(figure, axes, grid="x")
    caption = f"Left of the line at 1 {lead} needs less. Geometric means over seeds, with 95 % confidence intervals."
    return CaptionedFigure("ratios", title, caption, figure)


def _curve(results: Results, measure: str) -> CaptionedFigure | None:
    """Held-out loss against time or energy: every seed thin, the median over seeds thick."""
    lines = {
        cell.strategy: [line for run in cell.runs if len(line := loss_curve(run.curve, measure)) > 1]
        for cell in results.cells
    }
    lines = {strategy: seeds for strategy, seeds in lines.items() if seeds}
    if not lines:
        return None
    target = -math.inf if results.target_loss is None else results.target_loss
    title = f"Held-out loss against {measure_label(measure, to_the_loss=False)}"
    figure, axes = new_figure(title, 3.3 + 0.2 * -(-(1 + len(lines)) // 2))
    for strategy, style in line_styles(lines).items():
        colour, dashes = style["color"], style["linestyle"]
        for line in lines[strategy]:
            axes.plot(*zip(*line, strict=True), color=colour, linewidth=0.8, alpha=0.4)
        typical = median_curve(lines[strategy], target)
        axes.plot(*zip(*typical, strict=True), color=colour, linewidth=2.2, linestyle=dashes)
        axes.plot(*typical[-1], color=colour, marker=style["marker"], markersize=8, markeredgecolor=SURFACE, zorder=4)
        axes.plot([], [], linewidth=2.2, label=strategy, **style)
    losses = [loss for seeds in lines.values() for line in seeds for _, loss in line]
    if results.target_loss is not None:
        label = f"target {plain(target)}"  # in the legend, since markers stand on the line
        axes.axhline(target, color=INK, linewidth=1, linestyle=(0, (2, 2)), label=label)
    ends = [seeds[0][-1][0] for seeds in lines.values()]
    label_axis(axes, "x", measure, ends if max(ends) > 20 * min(ends) else [])
    label_axis(axes, "y", "loss", losses)
    add_grid_and_legend(figure, axes, columns=4)
    return CaptionedFigure("loss-time" if measure == "seconds" else "loss-energy", title, _CURVES, figure)


def loss_curve(curve: Sequence[CurvePoint], measure: str) -> list[tuple[float, float]]:
    """(time or energy, loss) of each evaluation for which both are known."""
    points = [(getattr(point, measure), point.loss) for point in curve]
    return [(spent, loss) for spent, loss in points if spent is not None and math.isfinite(loss)]


def median_curve(seeds: Sequence[Sequence[tuple[float, float]]], target: float) -> list[tuple[float, float]]:
    """For each loss, the median over seeds of what it took to reach it, down to the loss that half of them reached.

    Above the target this is interpolated between evaluations. At the target it is the median of what it took to the
    first evaluation at or below it, as in tables. Below it there is nothing, since runs stop there: only those would
    count whose last evaluation happened to be far below.
    """
    best = [np.minimum.accumulate([loss for _, loss in line]) for line in seeds]
    spent = [np.array([x for x, _ in line]) for line in seeds]

    def first(line: np.ndarray, at: np.ndarray, level: float) -> float:
        if line[-1] > level:
            return math.inf
        after = int(np.argmax(line <= level))
        if after == 0 or level == target:
            return float(at[after])
        above, below = line[after - 1], line[after]
        return float(at[after - 1] + (at[after] - at[after - 1]) * (above - level) / (above - below))

    start = min(float(line[0]) for line in best)
    levels = sorted({float(loss) for line in best for loss in line if target < loss <= start}, reverse=True)
    points = [
        (median(first(line, at, level) for line, at in zip(best, spent, strict=True)), level)
        for level in (*levels, target)
    ]
    return [(x, level) for x, level in points if math.isfinite(x)]


def step_breakdown(cell: Cell, run: Run) -> tuple[float, float, float] | None:
    """Seconds of one step on one rank: computing, blocked in collectives, and neither. None if not split."""
    if run.compute_seconds is None or run.blocked_seconds is None or not run.steps:
        return None
    ranks = cell.ranks * cell.dp
    compute, blocked = run.compute_seconds / ranks, run.blocked_seconds / ranks
    idle = max(0.0, run.seconds - compute - blocked)
    return compute / run.steps, blocked / run.steps, idle / run.steps


def _parts(results: Results) -> CaptionedFigure | None:
    parts: dict[str, list[float]] = {}
    for cell in results.cells:
        seeds = [split for run in cell.runs if (split := step_breakdown(cell, run))]
        if seeds:
            parts[cell.strategy] = [fmean(column) for column in zip(*seeds, strict=True)]
    if not parts:
        return None
    title = "Activity of a rank in a step"
    figure, axes = new_figure(title, 1.6 + 0.5 * len(parts))
    totals = [sum(times) for times in parts.values()]
    for row, (strategy, (compute, blocked, idle)) in enumerate(parts.items()):
        colour, _ = strategy_style(strategy)
        axes.barh(row, compute, color=colour, edgecolor=colour, height=0.62)
        axes.barh(row, blocked, left=compute, facecolor="none", edgecolor=colour, hatch="////", height=0.62)
        axes.barh(row, idle, left=compute + blocked, facecolor="none", edgecolor=colour, height=0.62)
        total = compute + blocked + idle
        _beside(axes, (total, row), f"{quantity(total, 's', totals)}, {blocked / total:.0%} blocked" if total else "")
    axes.set_xlim(0, 1.5 * max(totals))
    _strategy_rows(axes, list(parts))
    axes.set_xlabel("step time, mean over ranks")
    axes.xaxis.set_major_formatter(unit_formatter("step_seconds"))
    axes.grid(visible=True, axis="x", alpha=0.8, linewidth=0.6)
    handles = [
        Patch(facecolor=MUTED, edgecolor=MUTED, label="computing"),
        Patch(facecolor="none", edgecolor=MUTED, hatch="////", label="blocked in collectives"),
        Patch(facecolor="none", edgecolor=MUTED, label="idle"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    caption = "Blocked is time in which a rank waits for the values of others. The step time of the tables is rank 0's."
    return CaptionedFigure("parts", title, caption, figure)


def _counts(results: Results, measure: str) -> CaptionedFigure | None:
    """A count of each strategy. Bytes differ by orders of magnitude: points on a logarithmic axis, and no bars, since
    the length of a bar on such an axis means nothing.
    """
    values = {cell.strategy: float(getattr(cell, measure)) for cell in results.cells}
    positive = [value for value in values.values() if value > 0]
    if not positive:
        return None
    of_bytes = measure == "bytes_per_step"
    title = "Bytes exchanged per step" if of_bytes else "FLOPs per step"
    figure, axes = new_figure(title, 1.3 + 0.5 * len(values))
    if of_bytes:
        log_axis(axes, "x")
        axes.set_xlim(min(positive) / 2, max(positive) * 8)
    else:
        axes.set_xlim(0, 1.3 * max(positive))
    for row, (strategy, value) in enumerate(values.items()):
        colour, marker = strategy_style(strategy)
        if of_bytes and value > 0:
            axes.plot(value, row, color=colour, marker=marker, markersize=8, linestyle="none")
        elif value > 0:
            axes.barh(row, value, color=colour, height=0.62)
        text = format_measure(value, measure, among=positive) if value > 0 else "none"
        _beside(axes, (value or min(positive), row), text, points=8)
    _strategy_rows(axes, list(values))
    axes.set_xlabel(f"sum over ranks{', logarithmic' if of_bytes else ''}")
    axes.xaxis.set_major_formatter(unit_formatter(measure))
    axes.grid(visible=True, axis="x", alpha=0.8, linewidth=0.6)
    return CaptionedFigure("bytes" if of_bytes else "flops", title, "By the cost formulas, over all ranks.", figure)


def _search(results: Results) -> CaptionedFigure | None:
    """Steps to the target of each trial, or its final loss if none reached it. Crosses mark trials without a value."""
    if not any(trial.loss is not None for trial in results.trials):
        return None
    by_steps = any(trial.chosen and trial.status == "target" for trial in results.trials)
    title, names = "Search for the learning rate", list(dict.fromkeys(trial.model for trial in results.trials))
    figure, axes = new_figure(title, 3.7 + 0.1 * len(names))
    heights = []
    for number, (name, style) in enumerate(line_styles(names).items()):
        trials = sorted((trial for trial in results.trials if trial.model == name), key=lambda trial: trial.lr)
        placed = [(trial, trial_height(trial, by_steps)) for trial in trials]
        points = [(trial.lr, height) for trial, height in placed if height is not None]
        axes.plot([x for x, _ in points], [y for _, y in points], label=name, markersize=5.5, **style)
        rings = [(trial.lr, height) for trial, height in placed if trial.chosen and height is not None]
        for at in rings:
            axes.plot(*at, marker="o", color=style["color"], markerfacecolor="none", markersize=11 + 3 * number)
        crosses = [trial.lr for trial, height in placed if height is None]
        transform, top = axes.get_xaxis_transform(), 1.02 + 0.04 * number
        axes.plot(
            crosses, [top] * len(crosses), "x", color=style["color"], transform=transform, clip_on=False, markersize=6
        )
        heights += [height for _, height in points]
    rates = sorted({trial.lr for trial in results.trials})
    axes.set_xscale("log")
    axes.set_xticks(rates[:: -(-len(rates) // 7)], [f"{rate:.3g}" for rate in rates[:: -(-len(rates) // 7)]])
    axes.minorticks_off()
    axes.margins(0.1, 0.2)
    words = "steps to the loss" if by_steps else "held-out loss at the end of a trial"
    label_axis(axes, "y", "steps" if by_steps else "loss", heights, words)
    axes.set_xlabel("learning rate")
    add_grid_and_legend(figure, axes, columns=4)
    return CaptionedFigure("learning-rates", title, _SEARCH, figure)


def trial_height(trial: Trial, by_steps: bool) -> float | None:
    """Where a trial is drawn; None if it has no value."""
    value = float(trial.steps) if by_steps else trial.loss
    if value is None or not math.isfinite(value) or trial.status == "diverged":
        return None
    return None if by_steps and trial.status != "target" else value


def _study(results: Results) -> list[CaptionedFigure | None]:
    """Measures against what varies most: a link or a setting of the cells. Modelled cells have figures of their own."""
    measures = dict.fromkeys((main_measure(results), "joules", "step_seconds", "joules_per_sample", "bytes_per_step"))
    if results.is_timed:
        measures = dict.fromkeys(("step_seconds", "joules_per_sample", "bytes_per_step"))
    elif results.settings.get("reference"):
        measures = dict.fromkeys(("joules", "seconds", "loss_at_equal_steps", "loss_at_equal_energy"))
    groups = [[cell for cell in results.cells if (cell.hardware is not None) == kind] for kind in (False, True)]
    return [_sweep(results, cells, measure) for cells in groups if cells for measure in measures]


def lines_of(results: Results, cells: Sequence[Cell]) -> tuple[str, dict[str, list[tuple[Any, Cell]]]]:
    """What varies most over cells, and the cells of each line by it: a line for each strategy and for whatever else
    distinguishes cells. A cell that does not have the setting has an x of None.
    """
    values: dict[str, set[Any]] = {"link": {cell.link for cell in cells}}
    values |= {name: {cell.settings.get(name) for cell in cells} - {None} for cell in cells for name in cell.settings}
    varied = max(values, key=lambda name: len(values[name]))
    lines: dict[str, list[tuple[Any, Cell]]] = {}
    for cell in cells:
        settings = cell.settings | {"link": cell.link}
        apart = [
            f"{name} {settings[name]}"
            for name in settings
            if name != varied and len({key for key in values[name] if _separates(cells, varied, name)}) > 1
        ]
        label = f"{cell.strategy} ({', '.join(apart)})" if apart else cell.strategy
        lines.setdefault(label, []).append((settings.get(varied), cell))
    return varied, lines


def _separates(cells: Sequence[Cell], varied: str, name: str) -> bool:
    """Whether two cells of a strategy differ in a setting at the same value of the varied one."""
    places: dict[Any, set[Any]] = {}
    for cell in cells:
        settings = cell.settings | {"link": cell.link}
        places.setdefault((cell.strategy, settings.get(varied)), set()).add(settings.get(name))
    return any(len(values) > 1 for values in places.values())


def _sweep(results: Results, cells: Sequence[Cell], measure: str) -> CaptionedFigure | None:
    """Medians of a measure against what varies; a horizontal line for a strategy that does not have that setting."""
    varied, lines = lines_of(results, cells)
    drawn = {
        label: [(x, value) for x, cell in points if (value := median_of(results, cell, measure)) is not None]
        for label, points in lines.items()
    }
    drawn = {label: points for label, points in drawn.items() if points}
    places = list(dict.fromkeys(x for points in lines.values() for x, _ in points if x is not None))
    if not drawn or len(places) < 2:
        return None
    modelled = cells[0].hardware is not None
    name = measure_label(measure, results.target_loss is not None)
    title = f"{name[:1].upper()}{name[1:]} against {varied}{', modelled' if modelled else ''}"
    figure, axes = new_figure(title, 3.5 + 0.2 * -(-len(drawn) // 2))
    numeric = all(isinstance(place, int | float) for place in places)
    for label, style in line_styles(drawn).items():
        points = [(x if numeric else places.index(x), y) for x, y in drawn[label] if x is not None]
        for height in (y for x, y in drawn[label] if x is None):
            axes.axhline(height, color=style["color"], linewidth=1.6, linestyle=style["linestyle"], label=label)
        if points:
            face = SURFACE if modelled else style["color"]
            xs, ys = zip(*sorted(points), strict=True)
            axes.plot(xs, ys, markersize=6, linewidth=1.6, markerfacecolor=face, label=label, **style)
    if numeric:
        counted_axis(axes, places)
    else:
        axes.set_xticks(range(len(places)), [str(place) for place in places])
    label_axis(axes, "y", measure, [y for points in drawn.values() for _, y in points], name)
    axes.set_xlabel("link between hosts" if varied == "link" else varied)
    add_grid_and_legend(figure, axes, columns=2 if max(map(len, drawn)) > 14 else 3)
    stem = f"{varied}-{measure.replace('_', '-')}{'-modelled' if modelled else ''}"
    hardware = f" Not run: computed for {cells[0].hardware}." if modelled else ""
    return CaptionedFigure(stem, title, f"Medians over seeds.{hardware}", figure)


def _strategy_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)


def _beside(axes: Axes, at: tuple[float, float], text: str, points: int = 5, xycoords: Any = "data") -> None:
    axes.annotate(text, at, xycoords=xycoords, xytext=(points, 0), textcoords="offset points", va="center", fontsize=9)
