"""Cost terms of feed-forward networks: what one rank of an `FFN` computes, sends and keeps in a training step."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Self

from phantom_parallel.cost.layers import column_layer, phantom_layer, row_layer, tensor_layer
from phantom_parallel.cost.terms import (
    OPTIMIZER_STATES,
    Exchange,
    LayerCost,
    Memory,
    Optimizer,
    Shape,
    representative,
)
from phantom_parallel.cost.whole_layers import Group, Stage, check_rows, fully_sharded
from phantom_parallel.families.ffn.config import LayerFeatures
from phantom_parallel.utils.layout import BlockLayout, RowLayout, nearest_divisors, positive, stage_layers
from phantom_parallel.utils.strategies import Strategy, StrategyName, get_strategy
from phantom_parallel.utils.wire import WireFormat

# Activations whose derivative needs the input; that of relu and tanh needs the output only.
KEEPS_INPUT = ("gelu", "silu")


@dataclass(frozen=True)
class FFNShape(LayerFeatures, Shape):
    """A feed-forward network and how it is run: ``ranks`` share it, and ``dp`` copies train on ``batch`` rows each.

    Blocks and ghosts belong to the strategy phantom.
    """

    family: ClassVar[str] = "ffn"
    listed: ClassVar[tuple[str, ...]] = ("width", "depth", "batch")

    strategy: StrategyName
    width: int
    depth: int
    ranks: int = 1
    batch: int = 64
    blocks: int | None = None
    ghosts: int | None = None
    dp: int = 1
    word_bytes: int = 4
    wire: WireFormat = "full"
    bias: bool = True
    activation: str = "relu"
    optimizer: Optimizer = "adam"
    input_grad: bool = False
    rank: int = 0
    in_features: int | None = None
    out_features: int | None = None
    micro_batches: int | None = None
    reshard_after_forward: bool = True
    layers: tuple[LayerCost, ...] = field(init=False, repr=False, compare=False)
    between: tuple[Exchange, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        strategy = get_strategy(self.strategy)
        if self.optimizer not in OPTIMIZER_STATES:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZER_STATES)}, got {self.optimizer!r}")
        positive(**{name: getattr(self, name) for name in ("width", "depth", "ranks", "batch", "dp", "word_bytes")})
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank must be from 0 to {self.ranks - 1}, got {self.rank}")
        strategy.check_ranks(self.ranks)
        strategy.check_wire(self.wire)
        strategy.check_blocks(self.blocks, self.ghosts)
        if strategy.splits_depth:
            stage_layers(self.depth, self.ranks)
        check_rows(self)
        if strategy.splits_layers and not strategy.has_blocks and self.width % self.ranks:
            raise ValueError(
                f"{self.ranks} ranks do not divide width={self.width}: "
                f"run on {nearest_divisors(self.width, self.ranks)} ranks"
            )
        layers, between = self._costs(strategy)
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "between", between)

    def _costs(self, strategy: Strategy) -> tuple[tuple[LayerCost, ...], tuple[Exchange, ...]]:
        """The layers, and the exchanges that belong to none of them."""
        if self.ranks > 1 and strategy.shards_rows:
            kept = self.depth - 1 if self.reshard_after_forward else 0
            groups = [Group((index,), index >= kept) for index in range(self.depth)]
            return fully_sharded(self.dense(batch=self.batch // self.ranks).layers, groups, self.ranks, self.rank)
        if self.stage is not None:
            one = self.dense(batch=self.batch // self.stage.micro_batches)
            layers = (replace(self.stage.cost(one.layers[index]), kept=self._kept(index)) for index in self.stage.own)
            return tuple(layers), self.stage.exchanges(one.batch * self.width)
        costs: dict[int, LayerCost] = {}
        for index in range(self.depth):  # layers repeat: only those that differ are worked out
            same = representative(index, self.depth)
            costs[index] = replace(costs[same], name=f"layers.{index}") if same in costs else self._layer(index)
        return tuple(costs.values()), ()

    @cached_property
    def stage(self) -> Stage | None:
        """The stage of the rank, of a pipeline on several ranks."""
        if self.ranks == 1 or self.micro_batches is None:
            return None
        return Stage(self.depth, self.ranks, self.rank, self.micro_batches)

    def _kept(self, index: int) -> int:
        """Words that a layer of a pipeline keeps of its input: of the model's own, all rows; of what the stage has
        received, nothing besides that.
        """
        assert self.stage is not None
        if index == 0:
            return self.batch * self.model_features[0]
        received = index == self.stage.own.start and self.activation == "identity"
        return 0 if received else self.stage.in_flight * self.batch // self.stage.micro_batches * self.width

    def _layer(self, index: int) -> LayerCost:
        """A layer with the activation that feeds it."""
        whole = self.strategy == "megatron" and index % 2 == 0  # between pairs features are whole on every rank
        words = self.batch * self.width // (1 if whole else self.ranks) if index else 0
        # read, write; read what was kept and the gradient, write the gradient
        return replace(self._map(index), streamed=(2 * words, 3 * words))

    def _map(self, index: int) -> LayerCost:
        input_grad = self.input_grad or index > 0
        given: dict[str, Any] = {"bias": self.bias, "wire": self.wire, "name": f"layers.{index}"}
        if self.strategy == "phantom":
            assert self.blocks is not None
            assert self.ghosts is not None
            blocks = BlockLayout(*self.features_of(index), self.blocks, self.ghosts, self.ranks)
            return phantom_layer(blocks, self.batch, input_grad=input_grad, rank=self.rank, **given)
        rows = RowLayout(*self.features_of(index), self.ranks)
        if self.strategy == "megatron":
            if index % 2:
                return row_layer(rows, self.batch, **given)
            left_over = index == self.depth - 1
            return column_layer(rows, self.batch, input_grad=input_grad, gather=left_over, **given)
        return tensor_layer(rows, self.batch, input_grad=input_grad, rank=self.rank, **given)

    @property
    def costs(self) -> tuple[LayerCost, ...]:
        return self.layers

    @property
    def model_exchanges(self) -> tuple[Exchange, ...]:
        return self.between

    def stages(self) -> list[tuple[Self, int]]:
        kinds = {0: self.ranks} if self.stage is None else self.stage.kinds()
        return [(replace(self, rank=rank), count) for rank, count in kinds.items()]

    def same_as(self, index: int) -> int:
        return representative(index, len(self.layers))

    @property
    def repeated(self) -> int:
        """The row layers' bias of the strategy megatron."""
        rows = range(1, self.depth, 2) if self.strategy == "megatron" and self.bias else ()
        return sum(self.features_of(index)[1] for index in rows)

    @property
    def memory(self) -> Memory:
        kept = super().memory
        return replace(kept, activations=kept.activations + self.word_bytes * self._kept_between())

    def _kept_between(self) -> int:
        """Words that the activations between layers keep besides what the layers keep."""
        if self.stage is not None:
            words = self.batch // self.stage.micro_batches * self.width
            activated = len(self.stage.own) - 1 if self.activation in KEEPS_INPUT else 0  # what came in lies there
            return self.stage.kept(words) + activated * self.stage.in_flight * words
        share = self.batch * self.width // self.ranks
        extra = 0
        for index in range(1, self.depth):
            whole = self.strategy == "megatron" and index % 2 == 0  # between pairs features are whole on every rank
            words = self.batch * self.width if whole else share
            if self.activation in KEEPS_INPUT:
                extra += words
            if self.strategy == "tensor" and self.ranks > 1 and self.activation in ("relu", "tanh"):
                extra += share  # the output, of which the layer keeps only the gathered copy
        return extra
