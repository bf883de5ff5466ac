"""The figures of comparisons and of studies."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

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
    measures = ["step_seconds", "joules_per_sample"] if results.is_timed else ["seconds", "joules", "measured_joules"]
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
    labelled: set[str] = set()
    for row, measure, value in rows:
        colour, marker = looks[measure]
        at = row + 0.22 * (measures.index(measure) - (len(measures) - 1) / 2)
        low, high = (value.mean if end is None else end for end in (value.low, value.high))
        label = None if measure in labelled else measure_label(measure)
        labelled.add(measure)
        axes.errorbar(
            value.mean, at, xerr=[[value.mean - low], [high - value.mean]], color=colour, fmt=marker, label=label
        )
        _beside(axes, (1, at), format_ratio(value.mean), xycoords=("axes fraction", "data"))
    axes.axvline(1, color=INK, linewidth=1.2)
    log_axis(axes, "x")
    axes.set_xlabel("ratio, 95 % interval")
    _strategy_rows(axes, [f"to {cell.strategy}" for cell in others])
    add_grid_and_legend(figure, axes, grid="x")
    caption = f"Left of the line at 1 {lead} needs less. Geometric means over seeds, with 95 % confidence intervals."
    return CaptionedFigure("ratios", title, caption, figure)


def _curve(results: Results, measure: str) -> CaptionedFigure | None:
    """Held-out loss against time or energy: every seed thin, that with the median at the end thick."""
    lines = {
        cell.strategy: [line for run in cell.runs if len(line := loss_curve(run.curve, measure)) > 1]
        for cell in results.cells
    }
    lines = {strategy: seeds for strategy, seeds in lines.items() if seeds}
    if not lines:
        return None
    title = f"Held-out loss against {measure_label(measure, to_the_loss=False)}"
    figure, axes = new_figure(title, 3.3 + 0.2 * -(-(1 + len(lines)) // 2))
    for strategy, style in line_styles(lines).items():
        middle = sorted(lines[strategy], key=lambda line: line[-1])[len(lines[strategy]) // 2]
        for line in lines[strategy]:
            axes.plot(*zip(*line, strict=True), color=style["color"], linewidth=0.8, alpha=0.4)
        marked: Any = {"linewidth": 2.2, "markersize": 8, "markevery": [-1], "markeredgecolor": SURFACE}
        axes.plot(*zip(*middle, strict=True), label=strategy, **marked, **style)
    losses = [loss for seeds in lines.values() for line in seeds for _, loss in line]
    if results.target_loss is not None:
        label = f"target {plain(results.target_loss)}"  # in the legend, since markers stand on the line
        axes.axhline(results.target_loss, color=INK, linewidth=1, linestyle=(0, (2, 2)), label=label)
    ends = [seeds[0][-1][0] for seeds in lines.values()]
    label_axis(axes, "x", measure, ends if max(ends) > 20 * min(ends) else [])
    label_axis(axes, "y", "loss", losses)
    add_grid_and_legend(figure, axes, columns=4)
    caption = "Each seed, to its first evaluation at or below the target. Thick: the one with the median at its end."
    return CaptionedFigure("loss-time" if measure == "seconds" else "loss-energy", title, caption, figure)


def loss_curve(curve: Sequence[CurvePoint], measure: str) -> list[tuple[float, float]]:
    """(time or energy, loss) of each evaluation for which both are known."""
    points = [(getattr(point, measure), point.loss) for point in curve]
    return [(spent, loss) for spent, loss in points if spent is not None and math.isfinite(loss)]


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
    looks: dict[str, Any] = {
        "computing": {},
        "blocked in collectives": {"fill": False, "hatch": "////"},
        "idle": {"fill": False},
    }
    for row, (strategy, times) in enumerate(parts.items()):
        colour, _ = strategy_style(strategy)
        for index, look in enumerate(looks.values()):
            axes.barh(row, times[index], left=sum(times[:index]), color=colour, edgecolor=colour, height=0.62, **look)
        total = sum(times)
        _beside(axes, (total, row), f"{quantity(total, 's', totals)}, {times[1] / total:.0%} blocked" if total else "")
    axes.set_xlim(0, 1.5 * max(totals))
    _strategy_rows(axes, list(parts))
    label_axis(axes, "x", "step_seconds", [], "step time, mean over ranks")
    axes.grid(visible=True, axis="x", alpha=0.8, linewidth=0.6)
    handles = [Patch(facecolor=MUTED, edgecolor=MUTED, label=label, **look) for label, look in looks.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    caption = "Blocked is time in which a rank waits for the values of others. The step time of the tables is rank 0's."
    return CaptionedFigure("parts", title, caption, figure)


def _counts(results: Results, measure: str) -> CaptionedFigure | None:
    """A count of each strategy, as points: on a logarithmic axis the length of a bar would mean nothing."""
    values = {cell.strategy: float(getattr(cell, measure)) for cell in results.cells}
    positive = [value for value in values.values() if value > 0]
    if not positive:
        return None
    title = measure_label(measure)[:1].upper() + measure_label(measure)[1:]
    figure, axes = new_figure(title, 1.3 + 0.5 * len(values))
    log_axis(axes, "x", max(positive) / min(positive))
    axes.set_xlim(min(positive) / 2, max(positive) * 8)
    for row, (strategy, value) in enumerate(values.items()):
        colour, marker = strategy_style(strategy)
        axes.plot(value or math.nan, row, color=colour, marker=marker, markersize=8, linestyle="none")
        text = format_measure(value, measure, among=positive) if value > 0 else "none"
        _beside(axes, (value or min(positive), row), text, points=8)
    _strategy_rows(axes, list(values))
    axes.set_xlabel("sum over ranks, logarithmic")
    axes.xaxis.set_major_formatter(unit_formatter(measure))
    axes.grid(visible=True, axis="x", alpha=0.8, linewidth=0.6)
    name = measure.removesuffix("_per_step")
    return CaptionedFigure(name, title, "By the cost formulas, over all ranks.", figure)


def _search(results: Results) -> CaptionedFigure | None:
    """Steps to the target of each trial, or its final loss if none reached it."""
    if not any(trial.loss is not None for trial in results.trials):
        return None
    by_steps = any(trial.chosen and trial.status == "target" for trial in results.trials)
    title, names = "Search for the learning rate", list(dict.fromkeys(trial.model for trial in results.trials))
    figure, axes = new_figure(title, 3.7 + 0.1 * len(names))
    heights: list[float] = []
    for number, (name, style) in enumerate(line_styles(names).items()):
        placed = [(trial, trial_height(trial, by_steps)) for trial in results.trials if trial.model == name]
        points = sorted((trial.lr, height, trial.chosen) for trial, height in placed if height is not None)
        axes.plot([x for x, _, _ in points], [y for _, y, _ in points], label=name, markersize=5.5, **style)
        for x, y, chosen in points:
            if chosen:
                axes.plot(x, y, marker="o", color=style["color"], markerfacecolor="none", markersize=11 + 3 * number)
        heights += [height for _, height, _ in points]
    counted_axis(axes, [trial.lr for trial in results.trials])
    axes.margins(0.1, 0.2)
    words = "steps to the loss" if by_steps else "held-out loss at the end of a trial"
    label_axis(axes, "y", "steps" if by_steps else "loss", heights, words)
    axes.set_xlabel("learning rate")
    add_grid_and_legend(figure, axes, columns=4)
    caption = (
        "The same rates for every model; the chosen one is ringed. Trials without a point diverged or were stopped."
    )
    return CaptionedFigure("learning-rates", title, caption, figure)


def trial_height(trial: Trial, by_steps: bool) -> float | None:
    """Where a trial is drawn; None if it has no value."""
    if trial.status == "diverged" or (by_steps and trial.status != "target"):
        return None
    return float(trial.steps) if by_steps else trial.loss


def _study(results: Results) -> list[CaptionedFigure | None]:
    """Measures against what varies most: a link or a setting of the cells. Modelled cells have figures of their own."""
    measures = [main_measure(results), "joules", "step_seconds", "joules_per_sample", "bytes_per_step"]
    if results.is_timed:
        measures.remove("joules")
    elif results.settings.get("reference"):
        measures = ["joules", "seconds", "loss_at_equal_steps", "loss_at_equal_energy"]
    groups = [[cell for cell in results.cells if (cell.hardware is not None) == kind] for kind in (False, True)]
    return [_sweep(results, cells, measure) for cells in groups if cells for measure in dict.fromkeys(measures)]


def lines_of(cells: Sequence[Cell]) -> tuple[str, dict[str, list[tuple[Any, Cell]]]]:
    """What varies most over cells, and the cells of each line by it: a line for each strategy and for whatever else
    distinguishes cells. A cell that does not have the setting has an x of None.
    """
    settings = [cell.settings | {"link": cell.link} for cell in cells]
    names = dict.fromkeys(["link", *(name for cell in cells for name in cell.settings)])
    varied = max(names, key=lambda name: len({setting.get(name) for setting in settings} - {None}))
    places = [(cell.strategy, setting.get(varied)) for cell, setting in zip(cells, settings, strict=True)]

    def separates(name: str) -> bool:
        """Whether two cells of a strategy differ in a setting at the same value of the varied one."""
        values = [setting.get(name) for setting in settings]
        return len(set(zip(places, values, strict=True))) > len(set(places))

    apart = [name for name in names if name != varied and separates(name)]
    lines: dict[str, list[tuple[Any, Cell]]] = {}
    for cell, setting in zip(cells, settings, strict=True):
        own = ", ".join(f"{name} {setting[name]}" for name in apart if name in setting)
        lines.setdefault(f"{cell.strategy} ({own})" if own else cell.strategy, []).append((setting.get(varied), cell))
    return varied, lines


def _sweep(results: Results, cells: Sequence[Cell], measure: str) -> CaptionedFigure | None:
    """Medians of a measure against what varies; a horizontal line for a strategy that does not have that setting."""
    varied, lines = lines_of(cells)
    drawn = {
        label: [(x, value) for x, cell in points if (value := median_of(results, cell, measure)) is not None]
        for label, points in lines.items()
    }
    drawn = {label: points for label, points in drawn.items() if points}
    places = list(dict.fromkeys(x for points in lines.values() for x, _ in points if x is not None))
    if not drawn or len(places) < 2:
        return None
    hardware = cells[0].hardware
    name = measure_label(measure, results.target_loss is not None)
    title = f"{name[:1].upper()}{name[1:]} against {varied}{', modelled' if hardware else ''}"
    figure, axes = new_figure(title, 3.5 + 0.2 * -(-len(drawn) // 2))
    numeric = all(isinstance(place, int | float) for place in places)
    for label, style in line_styles(drawn).items():
        points = [(x if numeric else places.index(x), y) for x, y in drawn[label] if x is not None]
        for height in (y for x, y in drawn[label] if x is None):
            axes.axhline(height, color=style["color"], linewidth=1.6, linestyle=style["linestyle"], label=label)
        if points:
            face = SURFACE if hardware else style["color"]
            xs, ys = zip(*sorted(points), strict=True)
            axes.plot(xs, ys, markersize=6, linewidth=1.6, markerfacecolor=face, label=label, **style)
    if numeric:
        counted_axis(axes, places)
    else:
        axes.set_xticks(range(len(places)), [str(place) for place in places])
    label_axis(axes, "y", measure, [y for points in drawn.values() for _, y in points], name)
    axes.set_xlabel("link between hosts" if varied == "link" else varied)
    add_grid_and_legend(figure, axes, columns=2 if max(map(len, drawn)) > 14 else 3)
    stem = f"{varied}-{measure.replace('_', '-')}{'-modelled' if hardware else ''}"
    note = f" Not run: computed for {hardware}." if hardware else ""
    return CaptionedFigure(stem, title, f"Medians over seeds.{note}", figure)


def _strategy_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)


def _beside(axes: Axes, at: tuple[float, float], text: str, points: int = 5, xycoords: Any = "data") -> None:
    axes.annotate(text, at, xycoords=xycoords, xytext=(points, 0), textcoords="offset points", va="center", fontsize=9)
