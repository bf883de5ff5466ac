"""The strategies by which a model is parallelised over ranks, with the rules of each, and the formats in which features
are sent between ranks (`ops.wire` has their codec).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from phantom_parallel.utils.layout import positive

StrategyName = Literal["phantom", "tensor", "megatron", "dense", "lowrank", "fsdp", "pipeline"]
PlannedName = StrategyName | Literal["tensor-2d", "caat-net"]
DEFAULT_GHOSTS = 16
WireFormat = Literal["full", "bf16", "int8"]
WIRE_FORMATS: tuple[WireFormat, ...] = get_args(WireFormat)
WIRE_WORD_BYTES: dict[str, int] = {"bf16": 2, "int8": 1}  # of a value; "full" has those of the products
SCALE_BYTES: dict[str, int] = {"full": 0, "bf16": 0, "int8": 4}  # of a row


def check_wire(wire: object) -> WireFormat:
    """Return a wire format; raise ValueError if it is none."""
    if wire not in WIRE_FORMATS:
        raise ValueError(f"wire must be one of {', '.join(WIRE_FORMATS)}, got {wire!r}")
    return wire


@dataclass(frozen=True)
class Strategy:
    """How a model is parallelised over the ranks that share it."""

    name: StrategyName
    explanation: str  # for readers of a report who do not know the strategies
    single_rank: bool = False  # whether a model must not be shared by several ranks
    has_blocks: bool = False  # whether the model has blocks and ghosts of its own, and is not the dense model
    low_rank: bool = False  # whether the model's matrices have a low rank, and it is not the dense model
    partial: bool = False  # whether ranks sum a part of the features only, and it is not the dense model
    shards_features: bool = False  # whether activations between layers are sharded by features, on a mesh
    shards_rows: bool = False  # whether the ranks of a model divide the rows of its batch among themselves
    splits_depth: bool = False  # whether ranks hold consecutive layers of a model, as the stages of a pipeline

    @property
    def same_model(self) -> bool:
        """Whether the model computes the dense model's function: losses are the same up to rounding."""
        return not (self.has_blocks or self.low_rank or self.partial)

    @property
    def sized_by_blocks(self) -> bool:
        """Whether blocks and ghosts give the size of the model: its own, or those of a phantom model to be equal to."""
        return self.has_blocks or self.low_rank

    @property
    def splits_layers(self) -> bool:
        """Whether the ranks of a model share the work of every layer."""
        return not (self.single_rank or self.shards_rows or self.splits_depth)

    def check_ranks(self, ranks: int) -> None:
        """Raise ValueError if a model cannot be shared by ``ranks`` ranks."""
        positive(ranks=ranks)
        if self.single_rank and ranks > 1:
            raise ValueError(f"the strategy {self.name} runs on one rank, got ranks={ranks}: use another one, or dp")

    def check_wire(self, wire: WireFormat) -> None:
        """Raise ValueError if values cannot be sent between the ranks of a model in this format."""
        check_wire(wire)
        if wire != "full" and (self.shards_rows or (self.splits_depth and wire != "bf16")):
            exchanged = "weights: leave it out" if self.shards_rows else "activations of stages: use bf16"
            raise ValueError(f"wire={wire!r} is a format of features, and {self.name} exchanges {exchanged}")

    def check_blocks(self, blocks: int | None, ghosts: int | None, low_rank: int | None = None) -> None:
        """Raise ValueError if blocks, ghosts or a rank are missing where they are needed, or given where not."""
        if self.has_blocks and (blocks is None or ghosts is None):
            raise ValueError(f"the strategy {self.name} needs blocks and ghosts, got blocks={blocks}, ghosts={ghosts}")
        if not self.has_blocks and (blocks is not None or ghosts is not None):
            raise ValueError(f"blocks and ghosts belong to the strategy phantom, not to {self.name}: leave them out")
        if (low_rank is not None) != self.low_rank:
            raise ValueError(f"low_rank belongs to the strategy lowrank, got {low_rank} for {self.name}")


STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy(
            "phantom",
            "every rank keeps its own blocks of features, and ranks exchange a few ghosts",
            has_blocks=True,
            shards_features=True,
        ),
        Strategy(
            "tensor",
            "every rank holds some rows of each weight, and ranks exchange whole activations at every layer",
            shards_features=True,
        ),
        Strategy(
            "megatron",
            "layers in pairs are split by columns and then by rows, with one exchange of whole activations per pair",
        ),
        Strategy("dense", "every rank holds the whole model, and works on rows of its own", single_rank=True),
        Strategy(
            "lowrank",
            "every matrix is a product of two thin ones, and ranks exchange the few values between these",
            low_rank=True,
            shards_features=True,
        ),
        Strategy(
            "fsdp",
            "every rank holds a part of each weight, gathers a whole layer to use it, and works on rows of its own",
            shards_rows=True,
        ),
        Strategy(
            "pipeline",
            "every rank holds some consecutive layers, and micro-batches pass through the ranks one after another",
            splits_depth=True,
        ),
    )
}
assert tuple(STRATEGIES) == get_args(StrategyName)
PLANNED = STRATEGIES | {  # and those that are only modelled: `cost.terms.grid_layer`, Megatron with less to sum
    "tensor-2d": Strategy("tensor-2d", "every rank holds a tile of each weight"),  # type: ignore[arg-type]
    "caat-net": Strategy("caat-net", "as megatron, with some channels summed only", partial=True),  # type: ignore[arg-type]
}


def get_strategy(name: object, among: Sequence[str] = tuple(STRATEGIES)) -> Strategy:
    """The strategy of that name, if it is one of those that a family has."""
    if not isinstance(name, str) or name not in among:
        raise ValueError(f"strategy must be one of {', '.join(among)}, got {name!r}")
    return PLANNED[name]


def default_blocks(ranks: int) -> int:
    """Return the default number of blocks of a phantom model: the larger of 4 and the number of ranks."""
    return max(4, ranks)


def wire_suffix(wire: WireFormat) -> str:
    """A short format as titles add it; empty for full."""
    return "" if wire == "full" else f", {wire} on the wire"


def head_splits_rows(
    rows: int, dim: int, vocab: int, ranks: int, *, wire: WireFormat, word_bytes: int, weight_bytes: int, parts: int = 1
) -> bool:
    """Whether the head of a language model on features sharded over ranks sends less in a training step if each rank
    takes some of the rows (sequences times positions), in equal ``parts``, and not some of the vocabulary (`ops.head`).
    """
    if ranks == 1 or rows % (ranks * parts):
        return False
    # Bytes of a row's features, its scale, and a number that is never rounded; there and back.
    features = 2 * (dim // ranks * WIRE_WORD_BYTES.get(wire, word_bytes) + SCALE_BYTES[wire] + 4)
    by_rows = rows // ranks * features + 2 * (vocab * dim // ranks) * weight_bytes
    return by_rows < rows * (features + 3 * 4)  # which has three numbers of the loss for each row
