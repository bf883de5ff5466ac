"""The figure of a communication profile: bytes sent by phase, size of message and operation."""

from collections.abc import Mapping, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from phantom_parallel.cost.dryrun import Messages, phases_of
from phantom_parallel.cost.ledger import up_to
from phantom_parallel.report.plots import LOOKS, fitted_legend

MARKERS = {"all_gather": "o", "reduce_scatter": "s", "all_reduce": "^", "all_to_all": "D"}
OTHER_MARKER = "P"


def draw(profiles: Mapping[str, Sequence[Messages]], title: str) -> Figure:
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
        _points(panel, {name: [row for row in rows if row.phase == phase] for name, rows in profiles.items()}, colours)
        panel.set_title(phase, fontsize=11)
    for panel in panels[: len(phases)][-columns:]:
        panel.set_xlabel("size of a message, up to (what a rank hands in)", fontsize=9)
    for panel in panels[len(phases) :]:
        panel.set_visible(False)
    low, high = panels[0].get_ylim()
    panels[0].set_ylim(low / 2, high * 4)  # room for the numbers above points
    figure.supylabel("bytes that a rank sends in the phase, logarithmic; 8x: in 8 messages", fontsize=10)
    figure.suptitle(title, fontsize=11)
    _legend(figure, profiles, colours)
    return figure


def _points(panel: Axes, profiles: Mapping[str, Sequence[Messages]], colours: Mapping[str, str]) -> None:
    """Points of one phase: of each size as many as there are profiles and operations, with the number of messages."""
    groups: dict[int, dict[tuple[str, str], list[Messages]]] = {}
    for name, rows in profiles.items():
        for row in rows:
            groups.setdefault(up_to(row.message_bytes), {}).setdefault((name, row.operation), []).append(row)
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


def _legend(figure: Figure, profiles: Mapping[str, Sequence[Messages]], colours: Mapping[str, str]) -> None:
    used = {row.operation for rows in profiles.values() for row in rows}
    handles: list[Artist] = [Patch(color=colours[name], label=name) for name in profiles]
    for operation in (*(one for one in MARKERS if one in used), *sorted(used - MARKERS.keys())):
        marker, label = MARKERS.get(operation, OTHER_MARKER), operation.replace("_", "-")
        handles.append(Line2D([], [], color="grey", marker=marker, markersize=7, linestyle="none", label=label))
    fitted_legend(figure, handles, columns=len(handles))
