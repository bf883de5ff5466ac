"""Figures of plans, dry runs and conversions, each as PNG and as SVG."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from phantom_parallel.cost.dryrun import Messages, phases_of
from phantom_parallel.cost.planner import TWO_LEVEL, Candidate, PlanRequest
from phantom_parallel.report.plots import LOOKS, SECOND_PHANTOM, fitted_legend, log_axis, new_figure, plot_style, save
from phantom_parallel.report.tables import csv_text
from phantom_parallel.utils.files import write_text

STEP_TIME, ENERGY = "step time, ms (modelled)", "energy of a step on all devices, J (modelled)"


def draw_scaling(request: PlanRequest, curves: Mapping[str, Sequence[Candidate]], folder: Path) -> list[Path]:
    """Step time and modelled energy against devices, one curve a strategy."""
    panels: dict[str, Callable[[Candidate], float]] = {STEP_TIME: lambda c: 1e3 * c.seconds}
    if request.profile.has_power:
        panels[ENERGY] = lambda c: c.joules or 0.0
    figure = Figure(figsize=(0.5 + 5.25 * len(panels), 4.6), layout="constrained")
    panel_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    phantoms = [name for name in curves if name.startswith("phantom") and not name.endswith(TWO_LEVEL)]
    counts = sorted({c.devices for curve in curves.values() for c in curve})
    for axes, (label, height) in zip(panel_axes, panels.items(), strict=True):
        for name, curve in curves.items():
            second = name.removesuffix(TWO_LEVEL) in phantoms[1:]
            colour, marker = SECOND_PHANTOM if second else LOOKS[curve[0].layout.strategy]
            style = {"color": colour, "marker": marker, "linestyle": "--" if name.endswith(TWO_LEVEL) else "-"}
            axes.plot([c.devices for c in curve], [height(c) for c in curve], markersize=4.5, label=name, **style)
        axes.set(xscale="log", xlabel="devices", ylabel=label)
        log_axis(axes, "y")
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.grid(visible=True, which="major", alpha=0.25)
    _title(figure, "Scaling at a fixed batch", request, [c for curve in curves.values() for c in curve])
    handles, _ = panel_axes[0].get_legend_handles_labels()
    fitted_legend(figure, handles, columns=len(handles))
    return save(figure, folder / "scaling")


def _title(figure: Figure, title: str, request: PlanRequest, candidates: Sequence[Candidate]) -> None:
    """A title that says where phantom models stand beside the dense one, and nothing is known of their loss."""
    phantom = [c.parameters for c in candidates if not c.same_model]
    dense = [c.parameters for c in candidates if not c.layout.blocks]
    text = f"{title}\n{request.summary}, on {request.profile.name}"
    if phantom:
        smaller = ", smaller" if dense and max(phantom) < min(dense) else ""
        text += f"\nphantom is another{smaller} model than the dense one: its loss is not compared here"
    figure.suptitle(text, fontsize=11)


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
    colours = {name: next((LOOKS[s][0] for s in LOOKS if name.startswith(s)), "black") for name in profiles}
    columns = min(2, len(phases))
    lines = -(-len(phases) // columns)
    figure = Figure(figsize=(5.6 * columns, 1.4 + 2.9 * lines), layout="constrained")
    panels = list(figure.subplots(lines, columns, squeeze=False, sharey=True).flat)
    for panel, phase in zip(panels, phases, strict=False):
        of_phase = {name: [row for row in rows if row.phase == phase] for name, rows in profiles.items()}
        _message_points(panel, of_phase, colours)
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
    for operation in sorted(used, key=[*MARKERS, *sorted(used - MARKERS.keys())].index):
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

    ``path`` is that of the files, without their suffixes, and ``unit`` what the loss is.
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
