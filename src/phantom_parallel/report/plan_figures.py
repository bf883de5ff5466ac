"""Figures of a plan: scaling curves, and the time-energy scatter with its frontier. Each as PNG and as SVG."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from phantom_parallel.cost.planner import NOT_COMPARED, TWO_LEVEL, Candidate, Plan, PlanRequest
from phantom_parallel.report.plots import LOOKS, SECOND_PHANTOM, TickFormatter, fitted_legend, log_axis
from phantom_parallel.utils.files import atomic_file
from phantom_parallel.utils.wire import in_words


def draw_scaling(request: PlanRequest, curves: Mapping[str, Sequence[Candidate]], folder: Path) -> list[Path]:
    """Step time and modelled energy against devices, one curve a strategy."""
    powered = request.profile.has_power
    figure = Figure(figsize=(11 if powered else 6, 4.6), layout="constrained")
    axes = figure.subplots(1, 2 if powered else 1, squeeze=False)[0]
    _curves(
        axes[0], curves, [[1e3 * c.seconds for c in curve] for curve in curves.values()], "step time, ms (modelled)"
    )
    if powered:
        joules = [[c.joules or 0.0 for c in curve] for curve in curves.values()]
        _curves(axes[1], curves, joules, "energy of a step on all devices, J (modelled)")
    of_curves = [candidate for curve in curves.values() for candidate in curve]
    figure.suptitle(f"Scaling at a fixed batch\n{_subject(request)}{another_model(of_curves)}", fontsize=11)
    handles, _ = axes[0].get_legend_handles_labels()
    fitted_legend(figure, handles, columns=len(handles))
    return save(figure, folder / "scaling")


def draw_tradeoff(plan: Plan, folder: Path) -> list[Path]:
    """Every layout by step time and modelled energy, with the frontier and the best under the goal."""
    figure = Figure(figsize=(7.5, 5.2), layout="constrained")
    axes = figure.subplots()
    for strategy, (colour, marker) in LOOKS.items():
        found = [c for c in plan.candidates if c.layout.strategy == strategy]
        if found:
            label = strategy
            if strategy == "phantom" and plan.request.min_ghosts:
                label = f"phantom, at least {plan.request.min_ghosts} ghosts"
            _scatter(axes, found, colour, marker, label)
    _frontier(axes, plan.frontier_same_model, "frontier of the dense model", "dashed")
    _frontier(axes, plan.frontier, "frontier", "solid")
    best = plan.best
    axes.annotate(
        f"best for {plan.request.goal}:\n{best.layout}",
        (1e3 * best.seconds, best.joules or 0.0),
        xytext=(0.03, 0.93),
        textcoords="axes fraction",
        fontsize=9,
        va="top",
        arrowprops={"arrowstyle": "->", "color": "black", "linewidth": 0.8},
    )
    _log_axis(axes, "x", [1e3 * c.seconds for c in plan.candidates])
    _log_axis(axes, "y", [c.joules or 0.0 for c in plan.candidates])
    axes.set_xlabel("step time, ms (modelled)")
    axes.set_ylabel("energy of a step on all devices, J (modelled)")
    axes.grid(visible=True, which="major", alpha=0.25)
    warning = another_model(plan.candidates)
    figure.suptitle(f"Time and energy of each layout\n{_subject(plan.request)}{warning}", fontsize=11)
    handles, _ = axes.get_legend_handles_labels()
    fitted_legend(figure, handles, columns=4)
    return save(figure, folder / "time-energy")


def _curves(axes: Axes, curves: Mapping[str, Sequence[Candidate]], values: list[list[float]], label: str) -> None:
    phantoms = [name for name in curves if name.startswith("phantom") and not name.endswith(TWO_LEVEL)]
    for (name, curve), heights in zip(curves.items(), values, strict=True):
        colour, marker = LOOKS[curve[0].layout.strategy]
        if name.removesuffix(TWO_LEVEL) in phantoms[1:]:
            colour, marker = SECOND_PHANTOM
        line = {"color": colour, "marker": marker, "linestyle": "dashed" if name.endswith(TWO_LEVEL) else "solid"}
        axes.plot([c.devices for c in curve], heights, markersize=4.5, label=name, **line)  # type: ignore[arg-type]
    counts = sorted({c.devices for curve in curves.values() for c in curve})
    axes.set(xscale="log", xlabel="devices", ylabel=label)
    _log_axis(axes, "y", [height for heights in values for height in heights])
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.grid(visible=True, which="major", alpha=0.25)


def _log_axis(axes: Axes, which: str, values: Sequence[float]) -> None:
    """Make an axis logarithmic, with ticks between the decades: there may be only one decade in a figure."""
    log_axis(axes, which, values)
    (axes.xaxis if which == "x" else axes.yaxis).set_major_formatter(TickFormatter())


def _scatter(axes: Axes, found: list[Candidate], colour: str, marker: str, label: str) -> None:
    times, joules = [1e3 * c.seconds for c in found], [c.joules or 0.0 for c in found]
    axes.scatter(times, joules, color=colour, marker=marker, s=22, alpha=0.75, linewidths=0, label=label, zorder=2)


def _frontier(axes: Axes, front: Sequence[Candidate], label: str, style: str) -> None:
    times, joules = [1e3 * c.seconds for c in front], [c.joules or 0.0 for c in front]
    axes.step(times, joules, where="post", color="black", linestyle=style, linewidth=1.2, label=label, zorder=3)


def _subject(request: PlanRequest) -> str:
    wire = in_words(request.wire)
    return f"{request.model.summary}, batch {request.batch:,}, {request.dtype} on {request.profile.name}{wire}"


def another_model(candidates: Sequence[Candidate]) -> str:
    """A line for the title where phantom models stand beside the dense one, and nothing is known of their loss."""
    phantom = [one.parameters for one in candidates if one.loss == NOT_COMPARED]
    dense = [one.parameters for one in candidates if not one.layout.blocks]
    if not phantom:
        return ""
    smaller = ", smaller" if dense and max(phantom) < min(dense) else ""
    return f"\nphantom is another{smaller} model than the dense one: its loss is not compared here"


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as PNG and SVG. Equal figures give equal files."""
    paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    with matplotlib.rc_context({"svg.hashsalt": "phantom"}):
        with atomic_file(paths[0]) as file:
            figure.savefig(file, format="png", dpi=150)
        with atomic_file(paths[1]) as file:
            figure.savefig(file, format="svg", metadata={"Date": None})
    return paths
