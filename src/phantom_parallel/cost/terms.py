"""The formal analysis: what one rank computes, sends and keeps in a training step. The one source of every count.

A cost is a list of **terms**, each a matrix product or an exchange named as in the equations, so that comparisons,
plans and figures can sum any part of them and name the term that is wrong. Counts are per rank.

Bytes of an exchange are those that a rank must send (and receive), whatever the algorithm:

    all-gather       (R-1) w        w: what one rank contributes
    reduce-scatter   (R-1) w        w: what one rank ends up with
    all-reduce       2 (R-1)/R w    w: the whole, summed on every rank
    all-to-all       (R-1) w        w: what one rank sends to each other
    send             w              w: what one rank sends to another

An all-gather or reduce-scatter built from all-to-all moves the same. In a short wire format a reduce-scatter is an
all-to-all, an all-reduce is one of those and an all-gather, and int8 has a scale for each row (`ops.wire`). Elementwise
work is not counted, as in torch's own counter. The layers that models consist of are in `cost.layers`; a model
family has its own shape in ``families/<family>/cost.py``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

from phantom_parallel.utils.layout import check_micro_batches, nearest_divisors
from phantom_parallel.utils.settings import Features, HasModel, NonNegativeInt, PositiveInt, Ranks, validate
from phantom_parallel.utils.strategies import SCALE_BYTES, WIRE_WORD_BYTES, StrategyName, WireFormat, get_strategy

Phase = Literal["forward", "backward", "sync"]
Optimizer = Literal["sgd", "momentum", "adam"]
Op = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]

OPTIMIZER_STATES: dict[str, int] = {"sgd": 0, "momentum": 1, "adam": 2}


def optimizer_of(name: str, momentum: float) -> Optimizer:
    """The kind of optimizer, by its state, of a training with this optimizer and momentum."""
    if name == "adamw":
        return "adam"
    return "momentum" if momentum else "sgd"


@dataclass(frozen=True)
class Product:
    """A matrix product, or a batch of equal ones: (rows, inner) times (inner, columns)."""

    term: str
    phase: Phase
    batch: int
    rows: int
    inner: int
    columns: int

    @property
    def multiply_adds(self) -> int:
        return self.batch * self.rows * self.inner * self.columns

    @property
    def flops(self) -> int:
        return 2 * self.multiply_adds


@dataclass(frozen=True)
class Exchange:
    """A collective. ``words`` is w of the table above; ``hidden_by`` names the products that run meanwhile.

    ``stride``: the distance of one of its ranks to the next, which tells the links that it uses.
    ``background``: it travels while other parts of the model compute.
    ``by_torch``: issued by torch's own styles, which use the backend's own op whatever our exchanges are built from.
    ``wire_word_bytes``: of a word on the wire, if not those of the products. ``extra_bytes`` come on top of the words:
    scales and sums that are never rounded.
    """

    term: str
    phase: Phase
    op: Op
    ranks: int
    words: int
    hidden_by: tuple[str, ...] = ()
    by_torch: bool = False
    stride: int = 1
    background: bool = False
    wire_word_bytes: int | None = None
    extra_bytes: int = 0

    def contribution(self, word_bytes: int) -> int:
        """w in bytes."""
        return self.words * (self.wire_word_bytes or word_bytes) + self.extra_bytes

    @property
    def codec_words(self) -> int:
        """Words that encoding and decoding read and write, about: an estimate, for times only."""
        return 0 if self.wire_word_bytes is None else 3 * self.ranks * self.words

    def moved_bytes(self, word_bytes: int) -> int:
        """Bytes that a rank sends; an all-reduce's share that is not whole is rounded up."""
        handed_in = self.contribution(word_bytes)
        if self.op == "all_reduce":
            return -(-2 * (self.ranks - 1) * handed_in // self.ranks)
        return handed_in if self.op == "send" else (self.ranks - 1) * handed_in

    def message_bytes(self, word_bytes: int) -> int:
        """Bytes that a rank hands in, as the ledger calls a message."""
        pieces = self.ranks if self.op in ("reduce_scatter", "all_to_all") else 1
        return self.contribution(word_bytes) * pieces


def bytes_within(moved: int, ranks: int, stride: int, near: int) -> int:
    """Of the bytes that a rank sends, equally many to each other rank of a group, those to ranks among its own ``near``
    consecutive ones, such as those of a block or of a node.
    """
    return moved * (min(ranks, max(1, near // stride)) - 1) // (ranks - 1) if ranks > 1 else 0


@dataclass(frozen=True)
class LayerCost:
    """One layer on one rank. ``kept`` is the words that its operator keeps for backward.

    ``streamed`` is the words that elementwise work around it reads and writes, forward and backward: an estimate, for
    times only. ``fused``: the products are one kernel, which leaves nothing in memory in between.
    """

    name: str = field(compare=False)  # so that parts that repeat are equal, and timed once
    parameters: tuple[int, ...]  # of each parameter, this rank's part
    products: tuple[Product, ...]
    exchanges: tuple[Exchange, ...]
    kept: int
    kept_bytes: int = 0  # kept besides, of other sizes than a word: indices, statistics
    streamed: tuple[int, int] = (0, 0)
    fused: bool = False
    whole_gradients: tuple[int, ...] = ()  # of each parameter, where they are not of the parameters' own sizes
    leading: tuple[int, ...] = ()  # first dimension of each parameter, where the rank holds them whole
    calls: int = 1  # how often it runs in a step

    @property
    def gradients(self) -> tuple[int, ...]:
        """Words of each parameter's gradient on this rank."""
        return self.whole_gradients or self.parameters


def on_wire(exchange: Exchange, rows: int, wire: WireFormat) -> Exchange:
    """An exchange of so many rows in a wire format."""
    if wire == "full":
        return exchange
    op: Op = "all_to_all" if exchange.op == "reduce_scatter" else exchange.op
    extra = exchange.extra_bytes + rows * SCALE_BYTES[wire]
    return replace(exchange, op=op, wire_word_bytes=WIRE_WORD_BYTES[wire], extra_bytes=extra)


def summed_on_wire(
    term: str, phase: Phase, ranks: int, rows: int, features: int, wire: WireFormat, hidden_by: tuple[str, ...] = ()
) -> list[Exchange]:
    """The all-reduce of so many rows of features; in a short wire format a reduce-scatter and an all-gather."""
    if wire == "full":
        return [Exchange(term, phase, "all_reduce", ranks, rows * features)]
    words = rows * features // ranks
    summed = Exchange(f"{term}, summed", phase, "reduce_scatter", ranks, words, hidden_by)
    gathered = Exchange(f"{term}, gathered", phase, "all_gather", ranks, words)
    return [on_wire(summed, rows, wire), on_wire(gathered, rows, wire)]


def over_blocks(exchange: Exchange, blocks: int | None) -> list[Exchange]:
    """An all-gather or reduce-scatter over all ranks, on more ranks than blocks the two that it consists of."""
    inside = exchange.ranks // blocks if blocks else 1
    if blocks is None or inside <= 1:
        return [exchange]
    across = replace(exchange, ranks=blocks, stride=inside)
    words, extra = exchange.words * blocks, exchange.extra_bytes * blocks
    within = replace(exchange, term=f"{exchange.term} inside", ranks=inside, words=words, extra_bytes=extra)
    return [across, within] if exchange.op == "all_gather" else [within, across]


def between_ranks(exchanges: list[Exchange]) -> tuple[Exchange, ...]:
    """Exchanges of one rank alone are left out: nothing is sent."""
    return tuple(exchange for exchange in exchanges if exchange.ranks > 1)


def in_turns(cost: LayerCost, parts: int, once: tuple[str, ...] = ()) -> LayerCost:
    """The cost of so many equal parts of a batch, of which ``cost`` is one.

    While exchanges of one part travel, others compute. The exchanges ``once`` serve all parts.
    """
    exchanges = []
    for e in cost.exchanges:
        terms = tuple(product.term for product in cost.products if product.phase == e.phase)
        exchanges += [e] if e.term in once else [replace(e, hidden_by=terms)] * parts
    return replace(
        cost,
        products=cost.products * parts,
        exchanges=tuple(exchanges),
        kept=cost.kept * parts,
        kept_bytes=cost.kept_bytes * parts,
        streamed=(cost.streamed[0] * parts, cost.streamed[1] * parts),
    )


def recomputed(cost: LayerCost) -> LayerCost:
    """The cost of a part whose forward is computed a second time in backward."""

    products, exchanges = list(cost.products), list(cost.exchanges)
    for p in (p for p in cost.products if p.phase == "forward"):
        products.append(replace(p, term=f"{p.term}, recomputed", phase="backward"))
    for e in (e for e in cost.exchanges if e.phase == "forward"):
        hidden_by = tuple(f"{term}, recomputed" for term in e.hidden_by)
        exchanges.append(replace(e, term=f"{e.term}, recomputed", phase="backward", hidden_by=hidden_by))
    forward, backward = cost.streamed
    streamed = (forward, backward + forward)
    return replace(cost, products=tuple(products), exchanges=tuple(exchanges), streamed=streamed)


def representative(index: int, depth: int) -> int:
    """A layer with the same cost: the first and the last stand apart, the others alternate at most."""
    return index if index in (0, depth - 1) else 1 + (index - 1) % 2


@dataclass(frozen=True)
class Shape(HasModel):
    """A model and how it is run: ``ranks`` share it, and ``dp`` data-parallel copies work on ``batch`` rows each.

    A family's shape gives the costs of the model's parts, and the sums over them are here. All ranks have equal work
    but those of FSDP2 and pipelines, whose ``rank`` matters. With these two, activations in `memory` are an estimate.
    """

    family: ClassVar[str]
    listed: ClassVar[tuple[str, ...]]  # settings that tables show, besides the layout's
    modes: ClassVar[tuple[str, ...]] = ("train",)  # keys of `passes`
    example: ClassVar[dict[str, Any]] = {}  # sizes of the model that is dry-run by default
    mode = "train"  # or a pass of inference
    interleave = 1  # parts of a batch that are interleaved

    model: Any
    ranks: Ranks = 1
    batch: Features = 64
    dp: Ranks = 1
    word_bytes: Literal[8, 4, 2] = 4
    wire: WireFormat = "full"
    optimizer: Optimizer = "adam"
    rank: NonNegativeInt = 0
    micro_batches: PositiveInt | None = None
    reshard_after_forward: bool = True

    def __post_init__(self) -> None:
        validate(self)
        strategy = get_strategy(self.strategy)
        strategy.check_wire(self.wire)
        if self.rank >= self.ranks:
            raise ValueError(f"rank must be from 0 to {self.ranks - 1}, got {self.rank}")
        self.model.check_ranks(self.ranks)
        if strategy.shards_rows and self.batch % self.ranks:
            near = nearest_divisors(self.batch, self.ranks)
            raise ValueError(f"{self.ranks} ranks do not divide the {self.batch} rows of a copy: run on {near} ranks")
        if strategy.splits_depth:
            object.__setattr__(self, "micro_batches", self.micro_batches or self.ranks)
            check_micro_batches(self.micro_batches or self.ranks, self.batch, self.ranks)
        elif self.micro_batches is not None:
            raise ValueError(f"micro_batches belongs to the strategy pipeline, not to {self.strategy}")
        if not self.reshard_after_forward and not strategy.shards_rows:
            raise ValueError(f"reshard_after_forward belongs to the strategy fsdp, not to {self.strategy}")

    @classmethod
    def of_training(cls, config: Any) -> Self:
        """The shape of one step of a training, from its `TrainConfig`."""
        names = ("model", "ranks", "dp", "wire", "micro_batches", "reshard_after_forward")
        return cls(
            **{name: getattr(config, name) for name in names},
            batch=config.batch // config.dp,
            optimizer=optimizer_of(config.optimizer, config.momentum),
        )

    @property
    def splits_work(self) -> bool:
        """Whether ranks share the work of each layer, or there is one rank; otherwise they run whole layers."""
        return self.ranks == 1 or get_strategy(self.strategy).splits_layers

    @cached_property
    def terms(self) -> tuple[tuple[LayerCost, ...], tuple[Exchange, ...]]:
        """The model's parts in order; and the exchanges that belong to none of them, of weights that are gathered or of
        a stream between stages.
        """
        raise NotImplementedError

    @property
    def costs(self) -> tuple[LayerCost, ...]:
        return self.terms[0]

    @property
    def repeated(self) -> int:
        """Parameters that every rank holds."""
        return 0

    @property
    def memory(self) -> "Memory":
        """Memory of one rank that lasts through a training step."""
        parameters = self.word_bytes * self.parameters
        gradients = self.word_bytes * sum(sum(part.gradients) for part in self.costs)
        state = gradients if self.optimizer == "momentum" else parameters  # momentum starts as a copy of the gradient
        return Memory(
            parameters=parameters,
            gradients=gradients,
            optimizer=state * OPTIMIZER_STATES[self.optimizer],
            activations=sum(self.word_bytes * part.kept + part.kept_bytes for part in self.costs),
        )

    def with_strategy(self, strategy: StrategyName, **changes: Any) -> Self:
        """The same sizes by a strategy that has no blocks, with other settings if they are given."""
        return self.updated(strategy=strategy, blocks=None, ghosts=None, **changes)

    def dense(self, **changes: Any) -> Self:
        """The dense model of the same sizes on one rank, with other fields if they are given."""
        settings = {"ranks": 1, "rank": 0, "micro_batches": None, "reshard_after_forward": True}
        return self.with_strategy("dense", **settings | changes)

    def passes(self) -> dict[str, Self]:
        """The shapes of everything that the model runs, by mode: a training step, and passes of inference if any."""
        return {"train": self}

    @property
    def step_name(self) -> str:
        """What the shape counts, in words."""
        return "one training step"

    @property
    def products(self) -> Iterator[Product]:
        return (product for layer in self.costs for product in layer.products)

    @property
    def exchanges(self) -> Iterator[Exchange]:
        """Those of the parts, and those of the model as a whole."""
        for part in self.costs:
            yield from part.exchanges
        yield from self.model_exchanges
        yield from self.copies_exchanges

    @property
    def model_exchanges(self) -> tuple[Exchange, ...]:
        return self.terms[1]

    @property
    def copies_exchanges(self) -> Iterator[Exchange]:
        """One all-reduce of each parameter's gradient over data-parallel copies; none in inference."""
        for part in self.costs if self.dp > 1 and self.mode == "train" else ():
            for words in filter(None, part.gradients):
                yield Exchange("gradients", "sync", "all_reduce", self.dp, words, stride=self.ranks)

    def stages(self) -> list[tuple[Self, int]]:
        """Ranks of a copy that differ in work, each with how many are like it."""
        return [(self, self.ranks)]

    def multiply_adds(self, phase: Phase | None = None) -> int:
        return sum(product.multiply_adds for product in self.products if phase in (None, product.phase))

    def moved_bytes(self, phase: Phase | None = None, *, near: int | None = None) -> int:
        """Bytes that this rank sends; with ``near``, only those within its own ``near`` consecutive ranks."""
        sent = [(e, e.moved_bytes(self.word_bytes)) for e in self.exchanges if phase in (None, e.phase)]
        return sum(moved if near is None else bytes_within(moved, e.ranks, e.stride, near) for e, moved in sent)

    @property
    def inside(self) -> int:
        """Ranks that share a block; 1 where ranks hold whole blocks, or where there are none."""
        return max(1, self.ranks // self.blocks) if self.blocks else 1

    def over_all_ranks(self, count: Callable[[Self], int]) -> int:
        """The sum of a count over all ranks of all copies. Ranks that share each layer's work have equally much."""
        if get_strategy(self.strategy).splits_layers:
            return count(self) * self.ranks * self.dp
        return sum(count(replace(self, rank=rank)) for rank in range(self.ranks)) * self.dp

    @property
    def parameters(self) -> int:
        """Parameters of this rank."""
        return sum(sum(layer.parameters) for layer in self.costs)

    @property
    def model_parameters(self) -> int:
        """Parameters of the whole model, each counted once."""
        if not self.splits_work:
            return self.dense().parameters
        return (self.parameters - self.repeated) * self.ranks + self.repeated


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank that last through a step. Temporary buffers come on top."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations
