"""Figures of plans, dry runs and conversions, each as PNG and as SVG."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from phantom_parallel.cost.dryrun import Messages, phases_of
from phantom_parallel.cost.planner import NOT_COMPARED, TWO_LEVEL, Candidate, Plan, PlanRequest
from phantom_parallel.report.plots import LOOKS, SECOND_PHANTOM, fitted_legend, log_axis, new_figure, plot_style, save
from phantom_parallel.report.tables import csv_text
from phantom_parallel.utils.files import write_text


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
    log_axis(axes, "x")
    log_axis(axes, "y")
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
    log_axis(axes, "y")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.grid(visible=True, which="major", alpha=0.25)


def _scatter(axes: Axes, found: list[Candidate], colour: str, marker: str, label: str) -> None:
    times, joules = [1e3 * c.seconds for c in found], [c.joules or 0.0 for c in found]
    axes.scatter(times, joules, color=colour, marker=marker, s=22, alpha=0.75, linewidths=0, label=label, zorder=2)


def _frontier(axes: Axes, front: Sequence[Candidate], label: str, style: str) -> None:
    times, joules = [1e3 * c.seconds for c in front], [c.joules or 0.0 for c in front]
    axes.step(times, joules, where="post", color="black", linestyle=style, linewidth=1.2, label=label, zorder=3)


def _subject(request: PlanRequest) -> str:
    return f"{request.summary}, on {request.profile.name}"


def another_model(candidates: Sequence[Candidate]) -> str:
    """A line for the title where phantom models stand beside the dense one, and nothing is known of their loss."""
    phantom = [one.parameters for one in candidates if one.loss == NOT_COMPARED]
    dense = [one.parameters for one in candidates if not one.layout.blocks]
    if not phantom:
        return ""
    smaller = ", smaller" if dense and max(phantom) < min(dense) else ""
    return f"\nphantom is another{smaller} model than the dense one: its loss is not compared here"


# Dry runs

MARKERS = {"all_gather": "o", "reduce_scatter": "s", "all_reduce": "^", "all_to_all": "D"}
OTHER_MARKER = "P"


def draw_messages(profiles: Mapping[str, Sequence[Messages]], title: str) -> Figure:
    """A panel for each phase: bytes sent by size of message and operation, the profiles beside each other.

    Bytes differ by orders of magnitude: points on a logarithmic axis, and no bars, since the length of a bar on such an
    axis means nothing. Sizes are grouped by powers of two. A profile's name begins with its strategy, whose colour it
    gets.
    """
    phases = phases_of(profiles)
    if not phases:
        raise ValueError("one rank sends nothing, so there is no communication to draw: use more ranks")
    colours = {name: next((LOOKS[s][0] for s in LOOKS if name.startswith(s)), "black") for name in profiles}
    columns = min(2, len(phases))
    lines = -(-len(phases) // columns)
    figure = Figure(figsize=(5.6 * columns, 1.4 + 2.9 * lines), layout="constrained")
    panels = list(figure.subplots(lines, columns, squeeze=False, sharey=True).flat)
    for panel, phase in zip(panels, phases, strict=False):
        _message_points(
            panel, {name: [row for row in rows if row.phase == phase] for name, rows in profiles.items()}, colours
        )
        panel.set_title(phase, fontsize=11)
    for panel in panels[: len(phases)][-columns:]:
        panel.set_xlabel("size of a message, up to (what a rank hands in)", fontsize=9)
    for panel in panels[len(phases) :]:
        panel.set_visible(False)
    low, high = panels[0].get_ylim()
    panels[0].set_ylim(low / 2, high * 4)  # room for the numbers above points
    figure.supylabel("bytes that a rank sends in the phase, logarithmic; 8x: in 8 messages", fontsize=10)
    figure.suptitle(title, fontsize=11)
    _messages_legend(figure, profiles, colours)
    return figure


def _message_points(panel: Axes, profiles: Mapping[str, Sequence[Messages]], colours: Mapping[str, str]) -> None:
    """Points of one phase: of each size as many as there are profiles and operations, with the number of messages."""
    groups: dict[int, dict[tuple[str, str], list[Messages]]] = {}
    for name, rows in profiles.items():
        for row in rows:
            size = 1 << max(row.message_bytes - 1, 0).bit_length()  # the next power of two
            groups.setdefault(size, {}).setdefault((name, row.operation), []).append(row)
    width = 0.8 / max(len(group) for group in groups.values())
    for place, size in enumerate(sorted(groups)):
        group = groups[size]
        for index, ((name, operation), rows) in enumerate(group.items()):
            left = place + (index - (len(group) - 1) / 2) * width
            sent, count = sum(row.sent_bytes for row in rows), sum(row.count for row in rows)
            marker = MARKERS.get(operation, OTHER_MARKER)
            panel.plot(left, sent, color=colours[name], marker=marker, markersize=7, linestyle="none")
            panel.annotate(
                f"{count:,}x", (left, sent), xytext=(0, 5), textcoords="offset points", ha="center", fontsize=9
            )
    turned = 45 if len(groups) > 7 else 0
    panel.set_xticks(range(len(groups)), [_size(size) for size in sorted(groups)], rotation=turned)
    panel.set_xlim(-0.6, max(len(groups), 3) - 0.4)
    panel.set_yscale("log")
    panel.grid(visible=True, axis="y", which="major", alpha=0.25)


def _size(size: int) -> str:
    power = min((size.bit_length() - 1) // 10, 4)
    return f"{size >> 10 * power} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _messages_legend(figure: Figure, profiles: Mapping[str, Sequence[Messages]], colours: Mapping[str, str]) -> None:
    used = {row.operation for rows in profiles.values() for row in rows}
    handles: list[Artist] = [Patch(color=colours[name], label=name) for name in profiles]
    for operation in (*(one for one in MARKERS if one in used), *sorted(used - MARKERS.keys())):
        marker, label = MARKERS.get(operation, OTHER_MARKER), operation.replace("_", "-")
        handles.append(Line2D([], [], color="grey", marker=marker, markersize=7, linestyle="none", label=label))
    fitted_legend(figure, handles, columns=len(handles))


# Conversions

_OTHERS = (SECOND_PHANTOM, LOOKS["megatron"], LOOKS["tensor"], LOOKS["fsdp"])


def draw_curve(
    curves: Mapping[str, Sequence[tuple[float, float]]], dense_loss: float, path: Path, unit: str = "held-out loss"
) -> list[Path]:
    """Draw the loss against the share of the converted maps' multiply-adds, one curve a method, as PNG and as SVG, and
    write the points as CSV beside them.

    Args:
        curves: For each method, points of share and loss.
        dense_loss: The dense model's loss, drawn as a line.
        path: The files, without their suffixes.
        unit: What the loss is.
    """
    with plot_style():
        figure: Figure
        figure, axes = new_figure("Loss against multiply-adds")
        axes.axhline(dense_loss, color=LOOKS["dense"][0], linestyle=(0, (1, 1.2)), label="dense")
        looks = [LOOKS["phantom"], *_OTHERS]
        for (name, points), (colour, marker) in zip(curves.items(), looks, strict=False):
            ordered = sorted(points)
            axes.plot(*zip(*ordered, strict=True), color=colour, marker=marker, label=name)
        axes.set_xlabel("multiply-adds kept, share of the converted maps")
        axes.set_ylabel(unit)
        axes.legend(frameon=False)
        records: list[dict[str, object]] = [{"method": "dense", "kept": 1.0, "loss": dense_loss}]
        records += [
            {"method": name, "kept": kept, "loss": loss}
            for name, curve in curves.items()
            for kept, loss in sorted(curve)
        ]
        table = path.with_suffix(".csv")
        write_text(table, csv_text(records))
        return [*save(figure, path), table]
