"""The communication profile: which messages a rank hands in, how large and how many, by operation and phase.

A training step has the phases ``forward`` and ``backward`` (and ``sync`` over data-parallel copies). A pass of
inference is a phase by itself: a transformer's are ``prefill``, a prompt as long as the training's sequences, and
``decode``, one token for each sequence.
"""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from phantom_parallel.cost.ledger import Ledger
from phantom_parallel.cost.terms import Exchange, LayerCost, Shape

PHASES = ("prefill", "decode", "forward", "backward", "sync")


@dataclass(frozen=True)
class Messages:
    """All messages of one operation and size in one phase, on one rank.

    ``message_bytes`` is what the rank hands in each time, ``sent_bytes`` what it must send for all of them (see
    `cost.terms`). ``carries`` names the terms of the equations, and the parts they belong to, where they are known.
    ``stride`` is the distance of one rank of the group to the next.
    """

    phase: str
    operation: str
    ranks: int
    count: int
    message_bytes: int
    sent_bytes: int
    carries: str = ""
    stride: int = 1


def profile(shape: Shape) -> list[Messages]:
    """The messages of a training step by the formulas, after those of each pass of inference that the model has."""
    passes = [_grouped(one, mode) for mode, one in shape.passes().items() if mode != "train"]
    return [message for messages in (*passes, _grouped(shape)) for message in messages]


def profile_of(ledger: Ledger) -> list[Messages]:
    """The messages that a ledger counted, under its phases, as set by ``with ledger.phase("decode")``."""
    counted: dict[tuple[str, str, int, int, int], tuple[int, int]] = {}
    for e, times in ledger.collectives.items():
        key = e.phase, e.op, e.ranks, e.stride, e.message
        count, sent = counted.get(key, (0, 0))
        counted[key] = count + times, sent + times * e.moved
    return _sorted(
        Messages(phase, op, ranks, count, message, sent, stride=stride)
        for (phase, op, ranks, stride, message), (count, sent) in counted.items()
    )


def _grouped(shape: Shape, phase: str | None = None) -> list[Messages]:
    groups: dict[tuple[str, str, int, int, int], list[tuple[str, str, int]]] = {}
    for part, e in _of_parts(shape):
        key = phase or e.phase, e.op, e.ranks, e.stride, e.message_bytes(shape.word_bytes)
        groups.setdefault(key, []).append((e.term, part, e.moved_bytes(shape.word_bytes)))
    return _sorted(
        Messages(phase, op, ranks, len(each), message, sum(sent for _, _, sent in each), _carries(each), stride)
        for (phase, op, ranks, stride, message), each in groups.items()
    )


def _of_parts(shape: Shape) -> Iterator[tuple[str, Exchange]]:
    """Exchanges with the part that they belong to, named the same in every layer; those of the model to none."""
    for part in shape.costs:
        for exchange in part.exchanges:
            yield _kind(part), exchange
    yield from (("", exchange) for exchange in (*shape.model_exchanges, *shape.copies_exchanges))


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
    for phase in phases_of(profiles):
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


def phases_of(profiles: Mapping[str, Sequence[Messages]]) -> list[str]:
    """The phases of several profiles, in order."""
    found = list(dict.fromkeys(row.phase for rows in profiles.values() for row in rows))
    return sorted(found, key=lambda phase: PHASES.index(phase) if phase in PHASES else len(PHASES))
