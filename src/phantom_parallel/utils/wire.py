"""The formats in which features travel between the ranks that share a model, by name; `ops.wire` has their codec."""

from typing import Literal, get_args

WireFormat = Literal["full", "bf16", "int8"]
WIRE_FORMATS: tuple[WireFormat, ...] = get_args(WireFormat)

WIRE_WORD_BYTES: dict[str, int] = {"bf16": 2, "int8": 1}  # of a value; "full" has those of the products
SCALE_BYTES: dict[str, int] = {"full": 0, "bf16": 0, "int8": 4}  # of a row


def in_words(wire: WireFormat) -> str:
    """A short format as titles add it; empty for full."""
    return "" if wire == "full" else f", {wire} on the wire"


def check_wire(wire: object) -> WireFormat:
    """Return a wire format; raise ValueError if it is none."""
    for known in WIRE_FORMATS:
        if wire == known:
            return known
    raise ValueError(f"wire must be one of {', '.join(WIRE_FORMATS)}, got {wire!r}")
