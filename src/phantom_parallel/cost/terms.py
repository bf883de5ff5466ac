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
work is not counted, as in torch's own counter. A model family has its own shape in ``families/<family>/cost.py``.

FSDP2 and pipelines run whole layers of the dense model, so that no formula of a product is new:

    fsdp       the dense model's products of batch / R rows. For each group of parameters, w words of it on a rank:
               forward    all-gather w
               backward   all-gather w, unless it was kept since forward;  reduce-scatter w
    pipeline   the products of a stage's own layers, M times of batch / M rows. For each micro-batch, w words of stream:
               forward    send w to the next stage
               backward   send w to the stage before
    stages     with pp, the same of any strategy that splits layers: a stage has ranks of its own, and its exchanges

``fully_shard`` divides each parameter by its first dimension, and pads what ranks do not divide: w has the padding, a
rank's own parameters do not. A pipeline keeps, about, the activations of as many micro-batches as stages follow, this
one included.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, Literal, Self

from phantom_parallel.utils import layout as layouts
from phantom_parallel.utils.layout import BlockLayout, RowLayout
from phantom_parallel.utils.settings import NO_OPTION, Features, HasModel, NonNegativeInt, PositiveInt, Ranks, validate
from phantom_parallel.utils.strategies import SCALE_BYTES, WIRE_WORD_BYTES, StrategyName, WireFormat, get_strategy

Phase = Literal["forward", "backward", "sync"]
Optimizer = Literal["sgd", "momentum", "adam"]
Op = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "broadcast"]

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
    ``background``: it is in flight while other parts of the model compute.
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

    def moved_bytes(self, word_bytes: int, near: int | None = None) -> int:
        """Bytes that a rank sends; with ``near``, only those within its own ``near`` consecutive ranks."""
        moved = bytes_sent(self.op, self.ranks, self.message_bytes(word_bytes))
        return bytes_within(moved, self.ranks, self.stride, near)

    def message_bytes(self, word_bytes: int) -> int:
        """Bytes of a rank's input to the collective, as the ledger counts a message."""
        pieces = self.ranks if self.op in ("reduce_scatter", "all_to_all") else 1
        return self.contribution(word_bytes) * pieces


def bytes_sent(op: str, ranks: int, message: int) -> int:
    """Bytes that a rank must send in a collective whose input has ``message`` bytes, rounded up for an all-reduce."""
    if op == "all_gather":
        return (ranks - 1) * message
    if op == "all_reduce":
        return -(-2 * (ranks - 1) * message // ranks)
    if op in ("reduce_scatter", "all_to_all", "scatter"):
        return (ranks - 1) * message // ranks
    return message  # broadcast, reduce, gather, send: a rank passes on what it has once


def bytes_within(moved: int, ranks: int, stride: int, near: int | None) -> int:
    """Of the bytes that a rank sends, equally many to each other rank of a group, those to ranks among its own ``near``
    consecutive ones, such as those of a block or of a node; all with None.
    """
    if near is None:
        return moved
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
    calls: int = 1  # how often it runs in a step; products, exchanges and ``streamed`` are those of one call

    @property
    def gradients(self) -> tuple[int, ...]:
        """Words of each parameter's gradient on this rank."""
        return self.whole_gradients or self.parameters


def on_wire(exchange: Exchange, rows: int, wire: WireFormat) -> Exchange:
    """An exchange of ``rows`` rows in a wire format."""
    if wire == "full":
        return exchange
    op: Op = "all_to_all" if exchange.op == "reduce_scatter" else exchange.op
    extra = exchange.extra_bytes + rows * SCALE_BYTES[wire]
    return replace(exchange, op=op, wire_word_bytes=WIRE_WORD_BYTES[wire], extra_bytes=extra)


def summed_on_wire(
    term: str, phase: Phase, ranks: int, rows: int, features: int, wire: WireFormat, hidden_by: tuple[str, ...] = ()
) -> list[Exchange]:
    """The all-reduce of ``rows`` rows of features; in a short wire format a reduce-scatter and an all-gather."""
    if wire == "full":
        return [Exchange(term, phase, "all_reduce", ranks, rows * features)]
    words = rows * -(-features // ranks)
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


def interleaved(cost: LayerCost, parts: int, once: tuple[str, ...] = ()) -> LayerCost:
    """The cost of ``parts`` equal parts of a batch, of which ``cost`` is one.

    While exchanges of one part are in flight, others compute. The exchanges ``once`` serve all parts.
    """
    exchanges = [[e] if e.term in once else behind([e] * parts, cost).exchanges for e in cost.exchanges]
    streamed, kept = (cost.streamed[0] * parts, cost.streamed[1] * parts), (cost.kept * parts, cost.kept_bytes * parts)
    made = replace(cost, products=cost.products * parts, exchanges=tuple(chain(*exchanges)), streamed=streamed)
    return replace(made, kept=kept[0], kept_bytes=kept[1])


def behind(exchanges: Iterable[Exchange], cost: LayerCost) -> LayerCost:
    """A part with these exchanges in place of its own, which overlap with its products."""
    phases = {phase: tuple(p.term for p in cost.products if p.phase == phase) for phase in ("forward", "backward")}
    return replace(cost, exchanges=tuple(replace(e, hidden_by=phases[e.phase]) for e in exchanges))


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


def _layer(
    name: str,
    parameters: list[int],
    products: list[Product],
    exchanges: list[Exchange],
    kept: int,
    *,
    bias: int,
    leading: int | None = None,
) -> LayerCost:
    """A layer's cost without terms that are empty, such as a single rank's exchanges. ``bias``: its size, or 0."""
    parameters = parameters + [bias] * (bias > 0)
    return LayerCost(
        name,
        tuple(parameters),
        tuple(product for product in products if product.multiply_adds),
        between_ranks(exchanges),
        kept,
        leading=() if leading is None else (leading,) * len(parameters),
    )


def phantom_layer(
    layout: BlockLayout,
    rows: int,
    *,
    bias: bool = True,
    input_grad: bool = True,
    rank: int = 0,
    wire: WireFormat = "full",
    name: str = "",
) -> LayerCost:
    """The phantom layer: a rank holds q whole blocks, or t ranks share each; then features are exchanged inside the
    block, and ghosts across blocks and then inside.
    """
    p, t, place, others = layout.blocks, layout.inside, layout.place_of(rank), (layout.blocks - 1) * layout.ghosts
    q, whole = max(1, p // layout.ranks), layout.block_in
    m_in, m_out, k = whole // t, layout.block_out // t, layout.ghosts // t
    features = {"L x": whole}  # of the input, in the products of the local weights
    if t > 1:
        before, after = place * m_in, (t - 1 - place) * m_in
        features = {"L x, own features": m_in, "L x, features before": before, "L x, features after": after}
    local = tuple(features)
    products = [
        *(Product(term, "forward", q, rows, size, m_out) for term, size in features.items()),
        Product("C x", "forward", q, rows, whole, k),
        Product("D g", "forward", q, rows, others, m_out),
        Product("D^T d", "backward", q, rows, m_out, others),
        Product("dL = d^T x", "backward", q, m_out, rows, whole),
        Product("dD = d^T g", "backward", q, m_out, rows, others),
        Product("dC = h^T x", "backward", q, k, rows, whole),
    ]
    if input_grad:
        products.append(Product("L^T d", "backward", q * t, rows, m_out, m_in))
        products.append(Product("C^T h", "backward", q * t, rows, k, m_in))
    back = ("L^T d",) if input_grad else ()
    meanwhile = ("dL = d^T x", "dD = d^T g", *back) if t == 1 else back or ("dL = d^T x",)
    across, words = layout.ranks // t, rows * q * k
    exchanges = [
        Exchange("x", "forward", "all_gather", t, rows * m_in, local[:1]),
        Exchange("g", "forward", "all_gather", across, words, local[1:] or local, stride=t),
        Exchange("g inside", "forward", "all_gather", t, rows * p * k),
        Exchange("h inside", "backward", "reduce_scatter", t, rows * p * k, ("dD = d^T g",)),
        Exchange("h", "backward", "reduce_scatter", across, words, meanwhile, stride=t),
    ]
    if input_grad:
        exchanges.append(Exchange("dx", "backward", "reduce_scatter", t, rows * m_in, ("dL = d^T x", "dC = h^T x")))
    exchanges = [on_wire(e, rows * (p if "inside" in e.term else 1), wire) for e in exchanges]
    parameters = [q * m_out * whole, q * k * whole, q * m_out * others]
    kept = rows * (q * whole + p * layout.ghosts + (m_in if t > 1 else 0))
    return _layer(name, parameters, products, exchanges, kept, bias=bias * q * m_out)


def tensor_layer(
    layout: RowLayout,
    rows: int,
    *,
    bias: bool = True,
    input_grad: bool = True,
    rank: int = 0,
    wire: WireFormat = "full",
    name: str = "",
) -> LayerCost:
    """The paper's baseline, with sharded input and output features; on one rank it is the dense layer."""
    ranks, n_in, m_out = layout.ranks, layout.in_features, layout.out_features // layout.ranks
    m_in = n_in // ranks
    products = [
        Product("W x, own features", "forward", 1, rows, m_in, m_out),
        Product("W x, features before", "forward", 1, rows, rank * m_in, m_out),
        Product("W x, features after", "forward", 1, rows, (ranks - 1 - rank) * m_in, m_out),
        Product("dW = d^T x", "backward", 1, m_out, rows, n_in),
    ]
    exchanges = [Exchange("x", "forward", "all_gather", ranks, rows * m_in, ("W x, own features",))]
    if input_grad:
        products.append(Product("W^T d", "backward", ranks, rows, m_out, m_in))
        exchanges.append(Exchange("dx", "backward", "reduce_scatter", ranks, rows * m_in, ("dW = d^T x",)))
    exchanges = [on_wire(exchange, rows, wire) for exchange in exchanges]
    return _layer(name, [m_out * n_in], products, exchanges, rows * n_in, bias=bias * m_out, leading=m_out)


def low_rank_layer(
    layout: RowLayout, rank: int, rows: int, *, bias: bool, input_grad: bool = True, wire: WireFormat, name: str
) -> LayerCost:
    """z = U (V x) + b: V sharded by input features, U by output features, the values in between summed over ranks."""
    ranks, m_in, m_out = layout.ranks, layout.in_features // layout.ranks, layout.out_features // layout.ranks
    products = [
        Product("V x", "forward", 1, rows, m_in, rank),
        Product("U g", "forward", 1, rows, rank, m_out),
        Product("U^T d", "backward", 1, rows, m_out, rank),
        Product("dU = d^T g", "backward", 1, m_out, rows, rank),
        Product("dV = h^T x", "backward", 1, rank, rows, m_in),
    ]
    if input_grad:
        products.append(Product("V^T h", "backward", 1, rows, rank, m_in))
    exchanges = summed_on_wire("g", "forward", ranks, rows, rank, wire)
    exchanges += summed_on_wire("h", "backward", ranks, rows, rank, wire, ("dU = d^T g",))
    parameters = [rank * m_in, m_out * rank]
    return _layer(name, parameters, products, exchanges, rows * (m_in + rank), bias=bias * m_out)


def column_layer(
    layout: RowLayout,
    rows: int,
    *,
    bias: bool,
    input_grad: bool = True,
    gather: bool = False,
    wire: WireFormat,
    name: str,
) -> LayerCost:
    """First of a Megatron pair: sharded output features; ``gather`` makes them whole, for an unpaired last layer."""
    ranks, n_in, m_out = layout.ranks, layout.in_features, layout.out_features // layout.ranks
    products = [
        Product("W x", "forward", 1, rows, n_in, m_out),
        Product("dW = d^T x", "backward", 1, m_out, rows, n_in),
    ]
    whole = Exchange("z", "forward", "all_gather", ranks, rows * m_out, by_torch=wire == "full")
    exchanges = [on_wire(whole, rows, wire)] if gather else []
    if input_grad:
        products.append(Product("W^T d", "backward", 1, rows, m_out, n_in))
        exchanges += summed_on_wire("dx", "backward", ranks, rows, n_in, wire, ("dW = d^T x",))
    return _layer(name, [m_out * n_in], products, exchanges, rows * n_in, bias=bias * m_out, leading=m_out)


def row_layer(layout: RowLayout, rows: int, *, bias: bool, wire: WireFormat, name: str) -> LayerCost:
    """Second of a Megatron pair: sharded input features, and an all-reduce. The bias is whole on every rank."""
    ranks, m_in, n_out = layout.ranks, layout.in_features // layout.ranks, layout.out_features
    products = [
        Product("W x", "forward", 1, rows, m_in, n_out),
        Product("W^T d", "backward", 1, rows, n_out, m_in),
        Product("dW = d^T x", "backward", 1, n_out, rows, m_in),
    ]
    exchanges = summed_on_wire("z", "forward", ranks, rows, n_out, wire)
    return _layer(name, [n_out * m_in], products, exchanges, rows * m_in, bias=bias * n_out, leading=n_out)


def grid_layer(
    layout: RowLayout,
    rows: int,
    grid: int,
    *,
    bias: bool,
    input_grad: bool = True,
    transposed: bool = False,
    wire: WireFormat = "full",
    name: str = "",
) -> LayerCost:
    """Two-dimensional weight-stationary (arXiv 2211.05102): a x b ranks, of which a = ``grid`` divide a layer's input
    features and b, which are neighbours, its output features; ``transposed`` the other way around, so that layers
    alternate. Between layers, features are divided over all ranks. Modelled only.
    """
    a, b = grid, layout.ranks // grid
    over_a, over_b = b, 1  # distances of ranks
    if transposed:
        a, b, over_a, over_b = b, a, over_b, over_a
    m_in, m_out = layout.in_features // a, layout.out_features // b
    x, z = rows * m_in // b, rows * m_out // a  # words on a rank between layers
    products = [
        Product("W x", "forward", 1, rows, m_in, m_out),
        Product("dW = d^T x", "backward", 1, m_out, rows, m_in),
    ]
    exchanges = [
        Exchange("x", "forward", "all_gather", b, x, ("W x",), stride=over_b),
        Exchange("z", "forward", "reduce_scatter", a, z, stride=over_a),
        Exchange("dz", "backward", "all_gather", a, z, ("W^T d",), stride=over_a),
    ]
    if input_grad:
        products.append(Product("W^T d", "backward", 1, rows, m_out, m_in))
        exchanges.append(Exchange("dx", "backward", "reduce_scatter", b, x, ("dW = d^T x",), stride=over_b))
    exchanges = [on_wire(exchange, rows, wire) for exchange in exchanges]
    return _layer(name, [m_out * m_in], products, exchanges, rows * m_in, bias=bias * m_out // a)


@dataclass(frozen=True)
class Group:
    """Parts whose parameters FSDP2 gathers together, by their index. ``kept``: until backward has used them."""

    parts: tuple[int, ...]
    kept: bool


def fully_sharded(
    parts: Sequence[LayerCost], groups: Iterable[Group], ranks: int, rank: int
) -> tuple[tuple[LayerCost, ...], tuple[Exchange, ...]]:
    """The parts of the dense model with a rank's shards of their parameters, and the exchanges of their groups."""
    made, exchanges = list(parts), []
    for group in groups:
        words = 0
        for index in group.parts:
            cost, own, padded = parts[index], [], 0
            for size, leading in zip(cost.parameters, cost.leading, strict=True):
                each, row = -(-leading // ranks), size // leading
                own.append(max(0, min(each, leading - rank * each)) * row)
                padded += each * row
            words += padded
            kept = cost.kept + (ranks * padded if group.kept else 0)
            made[index] = replace(cost, parameters=tuple(own), whole_gradients=(), kept=kept)
        if words:
            exchanges.append(Exchange("weights", "forward", "all_gather", ranks, words))
            if not group.kept:
                exchanges.append(Exchange("weights again", "backward", "all_gather", ranks, words))
            exchanges.append(Exchange("their gradients", "backward", "reduce_scatter", ranks, words))
    return tuple(made), tuple(exchanges)


@dataclass(frozen=True)
class Stage:
    """One stage, of index ``index``, of a pipeline that divides the ``layers`` of a model into ``stages``."""

    layers: int
    stages: int
    index: int
    micro_batches: int
    ranks: int = 1  # that share the layers of a stage

    @property
    def own(self) -> range:
        """The stage's layers."""
        return layouts.stage_layers(self.layers, self.stages, self.index)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.stages - 1

    @property
    def in_flight(self) -> int:
        """Micro-batches whose activations are kept at once."""
        return min(self.micro_batches, self.stages - self.index)

    def cost(self, micro_batch: LayerCost) -> LayerCost:
        """The cost of a part in all micro-batches, from that in one."""
        kept, kept_bytes = micro_batch.kept * self.in_flight, micro_batch.kept_bytes * self.in_flight
        return replace(micro_batch, kept=kept, kept_bytes=kept_bytes, calls=self.micro_batches)

    def exchanges(self, words: int, wire: WireFormat) -> tuple[Exchange, ...]:
        """What the stage sends, in full or in bf16, where a micro-batch's stream has ``words`` words."""
        short = WIRE_WORD_BYTES["bf16"] if wire == "bf16" else None
        sent = Exchange("stream", "forward", "send", self.stages, words, stride=self.ranks, wire_word_bytes=short)
        out = () if self.is_last else (sent,)
        back = () if self.is_first else (replace(sent, term="its gradient", phase="backward"),)
        return (out + back) * self.micro_batches

    def kinds(self) -> dict[int, int]:
        """Stages that differ in work, each with the number of stages like it; it is the one that keeps most."""
        more = self.layers % self.stages
        larger = max(0, min(more, self.stages - 1) - 1)  # of the stages in between, those with a layer more
        smaller = max(0, self.stages - 2 - larger)
        kinds = [(0, 1), (1, larger), (max(1, more), smaller), (self.stages - 1, 1)]
        return {index: count for index, count in kinds if count}


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
    modelled: ClassVar[tuple[str, ...]] = ("tensor-2d",)  # strategies that are planned, and cannot run
    mode = "train"  # or a pass of inference
    interleave = 1  # parts of a batch that are interleaved
    pp = 1  # stages of a pipeline, of ``ranks`` ranks each

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
    grid: Ranks = field(default=1, metadata=NO_OPTION)  # of the ranks, those that divide a layer's input features

    def __post_init__(self) -> None:
        validate(self)
        strategy = get_strategy(self.strategy)
        strategy.check_wire(self.wire)
        if self.rank >= self.ranks * self.pp:
            raise ValueError(f"rank must be from 0 to {self.ranks * self.pp - 1}, got {self.rank}")
        self.model.check_ranks(self.ranks // self.grid)
        if strategy.shards_rows and self.batch % self.ranks:
            near = layouts.nearest_divisors(self.batch, self.ranks)
            raise ValueError(f"{self.ranks} ranks do not divide the {self.batch} rows of a copy: run on {near} ranks")
        if strategy.splits_depth or self.pp > 1:
            stages = self.ranks if strategy.splits_depth else self.pp
            count = 1 if self.mode != "train" else self.micro_batches or stages  # inference passes rows on together
            object.__setattr__(self, "micro_batches", count)
            if self.mode == "train":
                layouts.check_micro_batches(count, self.batch, stages)
        elif self.micro_batches is not None:
            raise ValueError(f"micro_batches belongs to the strategy pipeline, not to {self.strategy}")
        if not self.reshard_after_forward and not strategy.shards_rows:
            raise ValueError(f"reshard_after_forward belongs to the strategy fsdp, not to {self.strategy}")

    @classmethod
    def of_training(cls, config: Any) -> Self:
        """The shape of one step of a training, from its `TrainConfig`."""
        names = ("model", "ranks", "pp", "dp", "wire", "micro_batches", "interleave", "activation_checkpointing")
        return cls(
            **{name: getattr(config, name) for name in names if name in cls.__dataclass_fields__},
            batch=config.batch // config.dp,
            optimizer=optimizer_of(config.optimizer, config.momentum),
            # A training by another strategy may use FSDP2 over its copies, which shapes do not count.
            reshard_after_forward=config.reshard_after_forward or not get_strategy(config.strategy).shards_rows,
        )

    @property
    def splits_work(self) -> bool:
        """Whether all ranks share the work of each layer, or there is one rank; otherwise they have layers of their own
        or run whole ones.
        """
        return self.pp == 1 and (self.ranks == 1 or get_strategy(self.strategy).splits_layers)

    def micro_batch(self) -> Self:
        """One micro-batch of a pipeline in the whole model, on the ranks of a stage."""
        batch = self.batch // (self.micro_batches or 1)
        if get_strategy(self.strategy).splits_depth:
            return self.dense(batch=batch)
        return self.updated(rank=self.rank % self.ranks, pp=1, dp=1, micro_batches=None, batch=batch)

    @cached_property
    def terms(self) -> tuple[tuple[LayerCost, ...], tuple[Exchange, ...]]:
        """The model's parts in order; and the exchanges that belong to none of them, of weights that are gathered or of
        a stream between stages.
        """
        raise NotImplementedError

    @property
    def costs(self) -> tuple[LayerCost, ...]:
        return self.terms[0]

    timed_parts = costs  # each with the exchanges that overlap with it

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
        cut = {name: None for name in ("blocks", "ghosts", "low_rank") if hasattr(self.model, name)}
        return self.updated(strategy=strategy, **cut | changes)

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
        return (product for layer in self.costs for product in layer.products * layer.calls)

    @property
    def exchanges(self) -> Iterator[Exchange]:
        """Those of the parts, and those of the model as a whole."""
        for part in self.costs:
            yield from part.exchanges * part.calls
        yield from self.model_exchanges
        yield from self.copies_exchanges

    @property
    def model_exchanges(self) -> tuple[Exchange, ...]:
        return self.terms[1]

    @property
    def copies_exchanges(self) -> Iterator[Exchange]:
        """One all-reduce of each bucket of gradients over data-parallel copies; none in inference."""
        parts = self.costs if self.dp > 1 and self.mode == "train" else ()
        words = [words for part in parts for words in part.gradients if words]
        for bucket in layouts.buckets([count * self.word_bytes for count in words]):
            total = sum(words[index] for index in bucket)
            yield Exchange("gradients", "sync", "all_reduce", self.dp, total, stride=self.ranks * self.pp)

    def stages(self) -> list[tuple[Self, int]]:
        """Ranks of a copy that differ in work, each with how many are like it."""
        if self.stage is None:
            return [(replace(self, rank=0), self.ranks)]
        each = self.stage.ranks
        return [(replace(self, rank=index * each), count * each) for index, count in self.stage.kinds().items()]

    @cached_property
    def stage(self) -> "Stage | None":
        """The stage of the rank, of a pipeline of several."""
        alone = get_strategy(self.strategy).splits_depth  # one rank is a stage
        stages, each = (self.ranks, 1) if alone else (self.pp, self.ranks)
        if stages == 1 or self.micro_batches is None:
            return None
        return Stage(self.model.depth, stages, self.rank // each, self.micro_batches, each)

    def multiply_adds(self, phase: Phase | None = None) -> int:
        parts = ((part.calls, p) for part in self.costs for p in part.products if phase in (None, p.phase))
        return sum(calls * product.multiply_adds for calls, product in parts)

    def moved_bytes(self, phase: Phase | None = None, *, near: int | None = None) -> int:
        """Bytes that this rank sends; with ``near``, only those within its own ``near`` consecutive ranks."""
        exchanges = [(part.calls, e) for part in self.costs for e in part.exchanges]
        exchanges += [(1, e) for e in (*self.model_exchanges, *self.copies_exchanges)]
        return sum(n * e.moved_bytes(self.word_bytes, near) for n, e in exchanges if phase in (None, e.phase))

    @property
    def inside(self) -> int:
        """Ranks that share a block; 1 where ranks hold whole blocks, or where there are none."""
        return max(1, self.ranks // self.blocks) if self.blocks else 1

    def over_all_ranks(self, count: Callable[[Self], int]) -> int:
        """The sum of a count over all ranks of all copies. Ranks that share each layer's work have equally much."""
        if self.pp == 1 and get_strategy(self.strategy).splits_layers:
            return count(self) * self.ranks * self.dp
        return sum(count(replace(self, rank=rank)) for rank in range(self.ranks * self.pp)) * self.dp

    @property
    def parameters(self) -> int:
        """Parameters of this rank."""
        return sum(sum(layer.parameters) for layer in self.costs)

    @property
    def model_parameters(self) -> int:
        """Parameters of the whole model, each counted once."""
        if not self.splits_work:
            return self.dense().parameters if self.pp == 1 else self.micro_batch().model_parameters
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
