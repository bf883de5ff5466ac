"""The communication profile: which messages a rank hands in, how large and how many, by operation and phase.

A training step has the phases ``forward`` and ``backward`` (and ``sync`` over data-parallel copies); a transformer's
inference has ``prefill``, a prompt as long as the training's sequences, and ``decode``, one token for each sequence.
"""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from phantom_parallel.cost.ledger import Ledger, up_to
from phantom_parallel.cost.terms import Exchange, LayerCost, Shape
from phantom_parallel.families.gpt.cost import GPTShape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PHASES = ("prefill", "decode", "forward", "backward", "sync")
HATCHES = {"all_gather": "", "reduce_scatter": "///", "all_reduce": "---", "all_to_all": "xxx"}


@dataclass(frozen=True)
class Messages:
    """All messages of one operation and size in one phase, on one rank.

    ``message_bytes`` is what the rank hands in each time, ``sent_bytes`` what it must send for all of them (see
    `cost.terms`). ``carries`` names the terms of the equations, and the parts they belong to, where they are known.
    """

    phase: str
    operation: str
    ranks: int
    count: int
    message_bytes: int
    sent_bytes: int
    carries: str = ""


def profile(shape: Shape) -> list[Messages]:
    """What the formulas say of a training step, and of a transformer's prefill and decode."""
    found = _grouped(shape)
    if not isinstance(shape, GPTShape) or shape.task != "train":
        return found
    return [*_grouped(shape.prefill(), "prefill"), *_grouped(shape.decode(), "decode"), *found]


def profile_of(ledger: Ledger) -> list[Messages]:
    """What a ledger counted, under the phases that it was told: ``with ledger.phase("decode")``."""
    counted: dict[tuple[str, str, int, int], tuple[int, int]] = {}
    for e, times in ledger.collectives.items():
        key = e.phase, e.op, e.ranks, e.message
        count, sent = counted.get(key, (0, 0))
        counted[key] = count + times, sent + times * e.moved
    return _sorted(
        Messages(phase, op, ranks, count, message, sent)
        for (phase, op, ranks, message), (count, sent) in counted.items()
    )


def _grouped(shape: Shape, phase: str | None = None) -> list[Messages]:
    groups: dict[tuple[str, str, int, int], list[tuple[str, str, int]]] = {}
    for part, exchange in _of_parts(shape):
        key = phase or exchange.phase, exchange.op, exchange.ranks, exchange.message_bytes(shape.word_bytes)
        groups.setdefault(key, []).append((exchange.term, part, exchange.moved_bytes(shape.word_bytes)))
    return _sorted(
        Messages(phase, op, ranks, len(each), message, sum(sent for _, _, sent in each), _carries(each))
        for (phase, op, ranks, message), each in groups.items()
    )


def _of_parts(shape: Shape) -> Iterator[tuple[str, Exchange]]:
    """Exchanges with the part that they belong to, named the same in every layer; gradients belong to none."""
    for part in shape.costs:
        for exchange in part.exchanges:
            yield _kind(part), exchange
    yield from (("", exchange) for exchange in shape.exchanges if exchange.phase == "sync")


def _carries(each: list[tuple[str, str, int]]) -> str:
    parts: dict[str, dict[str, None]] = {}
    for term, part, _ in each:
        parts.setdefault(term, {})[part] = None
    return "; ".join(f"{term} of {', '.join(of)}" if any(of) else term for term, of in parts.items())


def _kind(part: LayerCost) -> str:
    last = part.name.rpartition(".")[2]
    return "layers" if last.isdigit() else last


def _sorted(rows: Iterable[Messages]) -> list[Messages]:
    def place(row: Messages) -> tuple[int, str, int]:
        return PHASES.index(row.phase) if row.phase in PHASES else len(PHASES), row.operation, row.message_bytes

    return sorted(rows, key=place)


def as_rows(profiles: Mapping[str, Sequence[Messages]]) -> list[dict[str, Any]]:
    """Flat records of several profiles, each under its name."""
    return [{"profile": name, **asdict(row)} for name, rows in profiles.items() for row in rows]


def as_csv(profiles: Mapping[str, Sequence[Messages]]) -> str:
    """The same as a table of comma-separated values."""
    text = io.StringIO()
    names = ["profile", *(field.name for field in fields(Messages))]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(as_rows(profiles))
    return text.getvalue()


def table(profiles: Mapping[str, Sequence[Messages]], title: str = "") -> Table:
    """Phase by phase, the profiles below each other, for printing with rich."""
    made = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading, justify in (("phase", "left"), ("operation", "left"), ("count", "right"), ("message", "right")):
        made.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    made.add_column("bytes sent", justify="right", no_wrap=True)
    made.add_column("carries")
    for phase in _phases(profiles):
        made.add_section()
        made.add_row(phase, style="bold")
        for name, rows in profiles.items():
            of_phase = [row for row in rows if row.phase == phase]
            for row in of_phase:
                numbers = f"{row.count:,}", f"{row.message_bytes:,}", f"{row.sent_bytes:,}"
                made.add_row(f"  {name}", row.operation, *numbers, row.carries)
            if len(of_phase) > 1:
                count, sent = sum(row.count for row in of_phase), sum(row.sent_bytes for row in of_phase)
                made.add_row(f"  {name}", "all", f"{count:,}", "", f"{sent:,}", style="bold")
    return made


def draw(profiles: Mapping[str, Sequence[Messages]], title: str) -> "Figure":
    """A panel for each phase: bytes sent by size of message and operation, the profiles beside each other.

    Sizes are grouped by powers of two. A profile's name begins with its strategy, whose colour it gets.
    """
    from matplotlib.figure import Figure  # takes a second to import

    from phantom_parallel.report.plan_figures import LOOKS

    phases = _phases(profiles)
    if not phases:
        raise ValueError("one rank sends nothing, so there is no communication to draw: use more ranks")
    colours = {name: next((LOOKS[s][0] for s in LOOKS if name.startswith(s)), "black") for name in profiles}
    columns = min(2, len(phases))
    lines = -(-len(phases) // columns)
    figure = Figure(figsize=(5.6 * columns, 1.4 + 2.9 * lines), layout="constrained")
    panels = list(figure.subplots(lines, columns, squeeze=False, sharey=True).flat)
    for panel, phase in zip(panels, phases, strict=False):
        _bars(panel, {name: [row for row in rows if row.phase == phase] for name, rows in profiles.items()}, colours)
        panel.set_title(phase, fontsize=11)
    for panel in panels[: len(phases)][-columns:]:
        panel.set_xlabel("size of a message, up to (what a rank hands in)", fontsize=9)
    for panel in panels[len(phases) :]:
        panel.set_visible(False)
    low, high = panels[0].get_ylim()
    panels[0].set_ylim(low / 10, high * 4)
    figure.supylabel("bytes that a rank sends in the phase", fontsize=10)
    figure.suptitle(title, fontsize=11)
    _legend(figure, profiles, colours)
    return figure


def _bars(panel: "Axes", profiles: Mapping[str, Sequence[Messages]], colours: Mapping[str, str]) -> None:
    """Bars of one phase: of each size as many as there are profiles and operations, with the number of messages."""
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
            hatch = HATCHES.get(operation, "+++")
            panel.bar(left, sent, 0.9 * width, color=colours[name], hatch=hatch, edgecolor="white", linewidth=0.5)
            panel.annotate(
                f"{count:,}x", (left, sent), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=8
            )
    turned = 45 if len(groups) > 7 else 0
    panel.set_xticks(range(len(groups)), [_size(size) for size in sorted(groups)], rotation=turned)
    panel.set_xlim(-0.6, max(len(groups), 3) - 0.4)
    panel.set_yscale("log")
    panel.grid(visible=True, axis="y", which="major", alpha=0.25)


def _size(size: int) -> str:
    power = min((size.bit_length() - 1) // 10, 4)
    return f"{size >> 10 * power} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _legend(figure: "Figure", profiles: Mapping[str, Sequence[Messages]], colours: Mapping[str, str]) -> None:
    from matplotlib.patches import Patch

    used = {row.operation for rows in profiles.values() for row in rows}
    handles = [Patch(color=colours[name], label=name) for name in profiles]
    handles += [
        Patch(facecolor="grey", edgecolor="white", hatch=hatch, label=operation.replace("_", "-"))
        for operation, hatch in HATCHES.items()
        if operation in used
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)


def _phases(profiles: Mapping[str, Sequence[Messages]]) -> list[str]:
    found = list(dict.fromkeys(row.phase for rows in profiles.values() for row in rows))
    return sorted(found, key=lambda phase: PHASES.index(phase) if phase in PHASES else len(PHASES))
