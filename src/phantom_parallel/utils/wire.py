"""The formats in which features travel between the ranks that share a model, by name; `ops.wire` has their codec."""

from typing import Literal, get_args

WireFormat = Literal["full", "bf16", "int8"]
WIRE_FORMATS: tuple[WireFormat, ...] = get_args(WireFormat)

WIRE_WORD_BYTES: dict[str, int] = {"bf16": 2, "int8": 1}  # of a value; "full" has those of the products
SCALE_BYTES: dict[str, int] = {"full": 0, "bf16": 0, "int8": 4}  # of a row


def row_bytes(features: int, wire: WireFormat, word_bytes: int, exact_bytes: int = 0) -> int:
    """Bytes of a row on the wire: its features, its scale, and what is never rounded."""
    return features * WIRE_WORD_BYTES.get(wire, word_bytes) + SCALE_BYTES[wire] + exact_bytes


def head_splits_rows(
    rows: int, dim: int, vocab: int, ranks: int, *, wire: WireFormat, word_bytes: int, weight_bytes: int, parts: int = 1
) -> bool:
    """Whether the head of a language model on features sharded over ranks sends less in a training step if each rank
    takes some of the rows, and not some of the vocabulary (`ops.head`).

    Args:
        rows: Sequences times positions.
        dim: Features of the stream.
        vocab: Tokens.
        ranks: Ranks that share the model.
        wire: Format in which features travel.
        word_bytes: Bytes of a feature at full precision.
        weight_bytes: Bytes of a number of the head's weight.
        parts: Equal parts of the rows that go through the head one after another.
    """
    if ranks == 1 or rows % (ranks * parts):
        return False
    features = 2 * row_bytes(dim // ranks, wire, word_bytes, exact_bytes=4)
    by_rows = rows // ranks * features + 2 * (vocab * dim // ranks) * weight_bytes
    return by_rows < rows * (features + 3 * 4)  # which has three numbers of the loss for each row


def in_words(wire: WireFormat) -> str:
    """A short format as titles add it; empty for full."""
    return "" if wire == "full" else f", {wire} on the wire"


def check_wire(wire: object) -> WireFormat:
    """Return a wire format; raise ValueError if it is none."""
    for known in WIRE_FORMATS:
        if wire == known:
            return known
    raise ValueError(f"wire must be one of {', '.join(WIRE_FORMATS)}, got {wire!r}")
