"""The list of strategies: how a model is parallelised over ranks, and the rules of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from phantom_parallel.utils.layout import positive
from phantom_parallel.utils.wire import WireFormat, check_wire

StrategyName = Literal["phantom", "tensor", "megatron", "dense", "lowrank", "fsdp", "pipeline"]
DEFAULT_GHOSTS = 16


@dataclass(frozen=True)
class Strategy:
    """How a model is parallelised over the ranks that share it.

    Args:
        name: As options and files have it.
        summary: One line for help texts.
        explanation: One line for readers of a report who do not know the strategies.
        single_rank: Whether a model must not be shared by several ranks.
        has_blocks: Whether the model has blocks and ghosts of its own, and is not the dense model.
        low_rank: Whether the model's matrices have a low rank, and it is not the dense model.
        shards_features: Whether activations between layers are sharded by features, on a mesh.
        shards_rows: Whether the ranks of a model divide the rows of its batch among themselves.
        splits_depth: Whether the ranks of a model hold consecutive layers of it, as the stages of a pipeline.
    """

    name: StrategyName
    summary: str
    explanation: str
    single_rank: bool = False
    has_blocks: bool = False
    low_rank: bool = False
    shards_features: bool = False
    shards_rows: bool = False
    splits_depth: bool = False

    @property
    def same_model(self) -> bool:
        """Whether the model computes the dense model's function: losses are the same up to rounding."""
        return not (self.has_blocks or self.low_rank)

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
        """Raise ValueError if values cannot travel between the ranks of a model in this format."""
        check_wire(wire)
        if wire != "full" and (self.shards_rows or self.splits_depth):
            exchanged = "weights" if self.shards_rows else "activations of stages"
            raise ValueError(
                f"wire={wire!r} is a format of strategies that cut features over ranks, and {self.name} exchanges "
                f"{exchanged}: leave it out"
            )

    def check_blocks(self, blocks: int | None, ghosts: int | None) -> None:
        """Raise ValueError if blocks and ghosts are missing where they are needed, or given where they are not."""
        if self.has_blocks and (blocks is None or ghosts is None):
            raise ValueError(f"the strategy {self.name} needs blocks and ghosts, got blocks={blocks}, ghosts={ghosts}")
        if not self.has_blocks and (blocks is not None or ghosts is not None):
            raise ValueError(f"blocks and ghosts belong to the strategy phantom, not to {self.name}: leave them out")


STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy(
            "phantom",
            "blocks that exchange ghosts",
            "every rank keeps its own blocks of features, and ranks exchange a few ghosts",
            has_blocks=True,
            shards_features=True,
        ),
        Strategy(
            "tensor",
            "tensor parallelism with features cut in and out, as in the paper",
            "every rank holds some rows of each weight, and ranks exchange whole activations at every layer",
            shards_features=True,
        ),
        Strategy(
            "megatron",
            "torch's own column and row styles in pairs",
            "layers in pairs are split by columns and then by rows, with one exchange of whole activations per pair",
        ),
        Strategy(
            "dense",
            "the whole model on one rank",
            "every rank holds the whole model, and works on rows of its own",
            single_rank=True,
        ),
        Strategy(
            "lowrank",
            "matrices of low rank, whose ranks exchange the values in between",
            "every matrix is a product of two thin ones, and ranks exchange the few values between these",
            low_rank=True,
            shards_features=True,
        ),
        Strategy(
            "fsdp",
            "torch's fully_shard of the dense model",
            "every rank holds a part of each weight, gathers a whole layer to use it, and works on rows of its own",
            shards_rows=True,
        ),
        Strategy(
            "pipeline",
            "torch's pipeline of stages with the 1F1B schedule",
            "every rank holds some consecutive layers, and micro-batches pass through the ranks one after another",
            splits_depth=True,
        ),
    )
}
assert tuple(STRATEGIES) == get_args(StrategyName)


def get_strategy(name: object, among: Sequence[str] = tuple(STRATEGIES)) -> Strategy:
    """The strategy of that name, if it is one of those that a family has."""
    if not isinstance(name, str) or name not in among:
        raise ValueError(f"strategy must be one of {', '.join(among)}, got {name!r}")
    return STRATEGIES[name]


def default_blocks(ranks: int) -> int:
    """Return the default number of blocks of a phantom model: the larger of 4 and the number of ranks."""
    return max(4, ranks)
