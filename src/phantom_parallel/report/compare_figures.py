"""The figures of a comparison."""

import math
from collections.abc import Sequence
from statistics import median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from phantom_parallel.report import captions
from phantom_parallel.report.plots import (
    INK,
    MUTED,
    SURFACE,
    CaptionedFigure,
    LineLook,
    TickFormatter,
    add_grid_and_legend,
    distinct_looks,
    label_axis,
    log_axis,
    new_figure,
    plot_style,
    strategy_style,
)
from phantom_parallel.report.tables import FEW, ratio_measures
from phantom_parallel.study.analysis import ratio_words
from phantom_parallel.study.measures import measure_label
from phantom_parallel.study.results import Comparison, CurvePoint, Interval, Run, Trial
from phantom_parallel.study.units import format_measure, format_ratio, plain, quantity, upper


def comparison_figures(found: Comparison) -> list[CaptionedFigure]:
    """The figures that the results have data for."""
    with plot_style():
        drawn = [
            _curve(found, "seconds"),
            _curve(found, "joules"),
            _ratios(found),
            _search(found),
            _parts(found),
            _counts(found, "bytes_per_step"),
            _counts(found, "flops_per_step"),
        ]
    return [drawing for drawing in drawn if drawing is not None]


_CURVES = (
    "Thin: each seed, to its first evaluation at or below the target. Thick: the median over seeds of what each loss "
    "took, whose end is the median to the target, which half of the seeds or more must reach."
)


def runs_of(found: Comparison, strategy: str) -> list[Run]:
    """The runs of one strategy."""
    return [run for run in found.runs if run.strategy == strategy]


def _curve(found: Comparison, measure: str) -> CaptionedFigure | None:
    """Held-out loss against time or energy: every seed thin, the median over seeds thick."""
    lines = {
        one.strategy: [line for run in runs_of(found, one.strategy) if len(line := loss_curve(run.curve, measure)) > 1]
        for one in found.strategies
    }
    lines = {strategy: seeds for strategy, seeds in lines.items() if seeds}
    if not lines:
        return None
    title = f"Held-out loss against {measure_label(measure)}"
    figure, axes = new_figure(title, 3.3 + 0.2 * -(-(1 + len(lines)) // 2))
    looks = distinct_looks(lines)
    for strategy, seeds in lines.items():
        colour, marker, dashes = looks[strategy].colour, looks[strategy].marker, looks[strategy].dashes
        for line in seeds:
            axes.plot(*zip(*line, strict=True), color=colour, linewidth=0.8, alpha=0.4)
        typical = median_curve(seeds, found.target_loss)
        axes.plot(*zip(*typical, strict=True), color=colour, linewidth=2.2, linestyle=dashes)
        axes.plot(*typical[-1], color=colour, marker=marker, markersize=8, markeredgecolor=SURFACE, zorder=4)
        axes.plot([], [], color=colour, linewidth=2.2, linestyle=dashes, marker=marker, label=strategy)
    target = f"target {plain(found.target_loss)}"  # in the legend, since markers stand on the line
    axes.axhline(found.target_loss, color=INK, linewidth=1, linestyle=(0, (2, 2)), label=target)
    spent = [x for seeds in lines.values() for line in seeds for x, _ in line]
    losses = [loss for seeds in lines.values() for line in seeds for _, loss in line] + [found.target_loss]
    logarithmic = _is_wide([seeds[0][-1][0] for seeds in lines.values()])
    if logarithmic:
        spent = [x for x in spent if x > 0]
        axes.set_xlim(min(spent) / 1.1, 1.1 * max(spent))
        log_axis(axes, "x", spent)
    else:
        axes.set_xlim(0, 1.04 * max(spent))
    log_axis(axes, "y", losses)
    if min(losses) > 0:
        axes.set_ylim(min(losses) * (min(losses) / max(losses)) ** 0.12, max(losses) * 1.15)
    words = f"{measure_label(measure)}, logarithmic" if logarithmic else ""
    label_axis(axes, "x", measure, spent if logarithmic else [max(spent)], words)
    label_axis(axes, "y", "loss", losses)
    add_grid_and_legend(figure, axes, columns=4)
    name = "loss-time" if measure == "seconds" else "loss-energy"
    caption = f"{captions.to_the_loss(found, measure)} {_CURVES}"
    return CaptionedFigure(name, title, caption, figure)


def _is_wide(ends: Sequence[float]) -> bool:
    """Whether curves end so far apart that a linear axis would press the shorter ones together at its start."""
    return len(ends) > 1 and min(ends) > 0 and max(ends) > 20 * min(ends)


def loss_curve(curve: Sequence[CurvePoint], measure: str) -> list[tuple[float, float]]:
    """(time or energy, loss) of each evaluation for which both are known."""
    found = [(getattr(point, measure), point.loss) for point in curve]
    return [(spent, loss) for spent, loss in found if spent is not None and math.isfinite(loss)]


def median_curve(seeds: Sequence[Sequence[tuple[float, float]]], target: float) -> list[tuple[float, float]]:
    """For each loss, the median over seeds of what it took to reach it, down to the loss that half of them reached.

    Above the target this is interpolated between evaluations. At the target it is the median of what it took to the
    first evaluation at or below it, as in tables. Below it there is nothing, since runs stop there: only those would
    count whose last evaluation happened to be far below.
    """
    best = [np.minimum.accumulate([loss for _, loss in line]) for line in seeds]
    spent = [np.array([x for x, _ in line]) for line in seeds]
    levels = sorted({float(loss) for line in best for loss in line}, reverse=True)
    start = min(float(line[0]) for line in best)

    def first(line: np.ndarray, at: np.ndarray, level: float) -> float:
        if line[-1] > level:
            return math.inf
        after = int(np.argmax(line <= level))
        if after == 0:
            return float(at[0])
        above, below = line[after - 1], line[after]
        return float(at[after - 1] + (at[after] - at[after - 1]) * (above - level) / (above - below))

    def evaluated(line: np.ndarray, at: np.ndarray) -> float:
        return math.inf if line[-1] > target else float(at[int(np.argmax(line <= target))])

    typical = [
        (median(first(line, at, level) for line, at in zip(best, spent, strict=True)), level)
        for level in levels
        if target < level <= start
    ]
    typical.append((median(evaluated(line, at) for line, at in zip(best, spent, strict=True)), target))
    return [(x, level) for x, level in typical if math.isfinite(x)]


def step_breakdown(run: Run) -> tuple[float, float, float] | None:
    """Seconds of one step on one rank: computing, blocked in exchanges, and neither. None where they are not split."""
    if run.compute_seconds is None or run.blocked_seconds is None or not run.steps:
        return None
    ranks = run.ranks * run.dp
    compute, blocked = run.compute_seconds / ranks, run.blocked_seconds / ranks
    idle = max(0.0, run.seconds - compute - blocked)
    return compute / run.steps, blocked / run.steps, idle / run.steps


def _parts(found: Comparison) -> CaptionedFigure | None:
    parts: dict[str, tuple[float, float, float]] = {}
    for one in found.strategies:
        seeds = [split for run in runs_of(found, one.strategy) if (split := step_breakdown(run))]
        if seeds:
            compute, blocked, idle = (sum(column) / len(seeds) for column in zip(*seeds, strict=True))
            parts[one.strategy] = (compute, blocked, idle)
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
        _beside(axes, compute + blocked + idle, row, quantity(compute + blocked + idle, "s", totals))
    axes.set_xlim(0, 1.22 * max(totals))
    _strategy_rows(axes, list(parts))
    label_axis(axes, "x", "step_seconds", totals, "step time, mean over ranks")
    axes.grid(visible=True, axis="x", alpha=0.8, linewidth=0.6)
    handles = [
        Patch(facecolor=MUTED, edgecolor=MUTED, label="computing"),
        Patch(facecolor="none", edgecolor=MUTED, hatch="////", label="blocked in collectives"),
        Patch(facecolor="none", edgecolor=MUTED, label="idle"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return CaptionedFigure("parts", title, captions.parts_of_time(parts), figure)


def _counts(found: Comparison, measure: str) -> CaptionedFigure | None:
    """A count of each strategy. Bytes differ by orders of magnitude: points on a logarithmic axis, and no bars, since
    the length of a bar on such an axis means nothing.
    """
    values = {one.strategy: float(getattr(one, measure)) for one in found.strategies}
    positive = [value for value in values.values() if value > 0]
    if not positive:
        return None
    of_bytes = measure == "bytes_per_step"
    title = "Bytes exchanged per step" if of_bytes else "FLOPs per step"
    figure, axes = new_figure(title, 1.3 + 0.5 * len(values))
    low, high = (min(positive), max(positive)) if of_bytes else (0.0, max(positive))
    for row, (strategy, value) in enumerate(values.items()):
        colour, marker = strategy_style(strategy)
        if of_bytes and value > 0:
            axes.plot(value, row, color=colour, marker=marker, markersize=8, linestyle="none")
        elif value > 0:
            axes.barh(row, value, color=colour, height=0.62)
        text = format_measure(value, measure, among=positive) if value > 0 else "none"
        _beside(axes, max(value, low), row, text, points=8 if of_bytes else 5)
    if of_bytes:
        room = max(high / low, 2.0)
        axes.set_xlim(low / room**0.1, high * room**0.35)
        log_axis(axes, "x", axes.get_xlim())
    else:
        axes.set_xlim(0, 1.25 * high)
    _strategy_rows(axes, list(values))
    label_axis(axes, "x", measure, positive, f"sum over ranks{', logarithmic' if of_bytes else ''}")
    axes.grid(visible=True, axis="x", alpha=0.8, linewidth=0.6)
    caption = captions.counts(captions.lead_of(list(values)), measure, values)
    return CaptionedFigure("bytes" if of_bytes else "flops", title, caption, figure)


# Points of time and energy, in the figure of ratios of many strategies.
_POINTS = {"seconds": LineLook(INK, "o", "solid"), "joules": LineLook(MUTED, "s", "solid")}


def _ratios(found: Comparison) -> CaptionedFigure | None:
    """Points with their intervals and values in the margin. With few strategies there is a row for each measure and a
    point for each baseline; with many, a row for each of them and points for time and energy.
    """
    lead = captions.lead_of([one.strategy for one in found.strategies])
    ratios = [one for one in found.ratios if one.strategy == lead and one.ratio.mean > 0]
    many = len(found.strategies) > FEW
    if many:
        ratios = [one for one in ratios if one.measure in ("seconds", "joules")]
    if not ratios:
        return None
    known = {one.measure for one in ratios}
    measures = [measure for measure in ratio_measures(found, lead) if measure in known]
    others = list(dict.fromkeys(one.to for one in ratios))
    rows, points = (others, measures) if many else (measures, others)
    title = f"{upper(lead)} as a share of the others"
    figure, axes = new_figure(title, 1.4 + 0.26 * len(rows) * max(2, len(points)))
    looks = _POINTS if many else distinct_looks(points)
    ends = [1.0]
    for one in ratios:
        row, point = (one.to, one.measure) if many else (one.measure, one.to)
        colour, marker = looks[point].colour, looks[point].marker
        place = rows.index(row) + 0.44 * ((points.index(point) + 0.5) / len(points) - 0.5) * 1.3
        ends += _draw_ratio(axes, one.ratio, place, colour, marker)
    for point in points:
        label = ratio_words(point, found.strategies) if many else f"{lead} / {point}"
        axes.plot([], [], color=looks[point].colour, marker=looks[point].marker, linewidth=1.6, label=label)
    axes.axvline(1, color=INK, linewidth=1.2)
    axes.set_xlim(min(ends) / 1.25, max(ends) * 1.25)
    log_axis(axes, "x", ends, gap=0.15 if many else 0.25)  # labels of measures leave a short axis
    axes.xaxis.set_major_formatter(TickFormatter())
    axes.set_xlabel("ratio, 95 % interval")  # short: a longer one is cut beside the labels of the rows
    names = [f"to {row}" if many else ratio_words(row, found.strategies) for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    add_grid_and_legend(figure, axes, grid="x")
    return CaptionedFigure("ratios", title, captions.all_ratios(found, lead, ratios), figure)


def _draw_ratio(axes: Axes, ratio: Interval, row: float, colour: str, marker: str) -> tuple[float, float]:
    """Draw one ratio; returns the ends of its interval."""
    low, high = (end if end and end > 0 else ratio.mean for end in (ratio.low, ratio.high))
    axes.plot([low, high], [row, row], color=colour, linewidth=1.6, solid_capstyle="butt")
    axes.plot(ratio.mean, row, color=colour, marker=marker, markersize=6, linestyle="none")
    axes.annotate(
        format_ratio(ratio.mean),
        (1, row),
        xycoords=("axes fraction", "data"),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
    )
    return low, high


def _search(found: Comparison) -> CaptionedFigure | None:
    """Steps to the target of each trial, or its final loss if none reached it. Crosses mark trials without a value."""
    finite = [trial.loss for trial in found.trials if trial.loss is not None and math.isfinite(trial.loss)]
    if not finite:
        return None
    by_steps = any(trial.chosen and trial.status == "target" for trial in found.trials)
    measure = "steps" if by_steps else "loss"
    title = "Search for the learning rate"
    names = list(dict.fromkeys(trial.strategy for trial in found.trials))
    figure, axes = new_figure(title, 3.7 + 0.1 * len(names))
    heights: list[float] = []
    looks = distinct_looks(names)
    row = min(_CROSSES, _MOST_CROSSES / len(names))
    for index, name in enumerate(names):
        trials = [trial for trial in found.trials if trial.strategy == name]
        ring = 11 + min(3.5, 18 / len(names)) * index
        heights += _draw_trials(axes, trials, looks[name], by_steps, ring=ring, top=0.97 - row * index)
    rates = [trial.lr for trial in found.trials]
    log_axis(axes, "x", rates)
    if len(set(rates)) <= 7:
        axes.set_xticks(sorted(set(rates)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    log_axis(axes, "y", heights)
    crosses = any(trial_height(trial, by_steps) is None for trial in found.trials)
    axes.margins(0.1, min(0.3, 0.14 + 0.02 * len(names)))  # for the largest ring
    if crosses:
        _room_above(axes, heights, row * (len(names) + 1))
    label_axis(axes, "y", measure, heights, "steps to the loss" if by_steps else "held-out loss at the end of a trial")
    axes.set_xlabel("learning rate")
    add_grid_and_legend(figure, axes, columns=4)
    caption = captions.learning_rates(found)
    if crosses:
        reason = "diverged, missed the loss, or could no longer be the best" if by_steps else "diverged"
        caption += f" Crosses at the top, a row for each: {reason}."
    return CaptionedFigure("learning-rates", title, caption, figure)


_CROSSES, _MOST_CROSSES = 0.055, 0.35  # height of a row of crosses at the top, and of all rows, as shares of the axes


def trial_height(trial: Trial, by_steps: bool) -> float | None:
    """Where a trial is drawn; None if it has no value."""
    value = float(trial.steps) if by_steps else trial.loss
    if value is None or not math.isfinite(value) or trial.status == "diverged":
        return None
    return None if by_steps and trial.status != "target" else value


def _draw_trials(
    axes: Axes, trials: Sequence[Trial], look: LineLook, by_steps: bool, *, ring: float, top: float
) -> list[float]:
    """Draw the trials of one model; returns their heights. Models may have the same points: rings differ in size, and
    crosses stand in rows of their own, at the height ``top`` as a share of the axes.
    """
    colour = look.colour
    placed = [(trial, trial_height(trial, by_steps)) for trial in sorted(trials, key=lambda one: one.lr)]
    points = [(trial.lr, height) for trial, height in placed if height is not None]
    style = {"color": colour, "linestyle": look.dashes, "marker": look.marker, "markersize": 5.5}
    axes.plot([x for x, _ in points], [y for _, y in points], label=trials[0].strategy, **style)  # type: ignore[arg-type]
    for trial, height in placed:
        if trial.chosen and height is not None:
            circle = {"color": colour, "markerfacecolor": "none", "markeredgewidth": 1.6, "markersize": ring}
            axes.plot(trial.lr, height, marker="o", **circle)  # type: ignore[arg-type]
    failed = [trial.lr for trial, height in placed if height is None]
    if failed:
        rows = [top] * len(failed)
        cross = {"color": colour, "transform": axes.get_xaxis_transform(), "markersize": 6, "markeredgewidth": 1.6}
        axes.plot(failed, rows, "x", **cross)  # type: ignore[arg-type]
    return [height for _, height in points]


def _room_above(axes: Axes, heights: Sequence[float], share: float) -> None:
    """Raise the top of the axes, so that no point stands in this share of them, among the rows of crosses."""
    if not heights:
        return
    low, high = axes.get_ylim()
    if axes.get_yscale() == "log":
        axes.set_ylim(low, high * (high / low) ** (share / (1 - share)))
    else:
        axes.set_ylim(low, high + (high - low) * share / (1 - share))


def _strategy_rows(axes: Axes, strategies: Sequence[str]) -> None:
    axes.set_yticks(range(len(strategies)), strategies)
    axes.set_ylim(len(strategies) - 0.5, -0.5)


def _beside(axes: Axes, x: float, y: float, text: str, points: int = 5) -> None:
    axes.annotate(text, (x, y), xytext=(points, 0), textcoords="offset points", va="center", fontsize=9)
