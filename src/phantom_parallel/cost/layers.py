"""Cost terms of layers: phantom, tensor parallel, Megatron's columns and rows; and of ranks that run whole layers.

FSDP2 and pipelines run whole layers of the dense model, so that no formula of a product is new:

    fsdp       the dense model's products of batch / R rows. For each group of parameters, w words of it on a rank:
               forward    all-gather w
               backward   all-gather w, unless it was kept since forward;  reduce-scatter w
    pipeline   the products of a stage's own layers, M times of batch / M rows. For each micro-batch, w words of stream:
               forward    send w to the next stage
               backward   send w to the stage before

``fully_shard`` divides each parameter by its first dimension, and pads what ranks do not divide: w has the padding, a
rank's own parameters do not. A pipeline keeps, about, the activations of as many micro-batches as stages follow, this
one included.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from phantom_parallel.cost.terms import (
    Exchange,
    LayerCost,
    Product,
    between_ranks,
    on_wire,
    summed_on_wire,
)
from phantom_parallel.utils.layout import BlockLayout, RowLayout, stage_layers
from phantom_parallel.utils.strategies import WireFormat


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
    """The phantom layer: ghosts out, ghosts in."""
    if layout.inside > 1:
        return _two_level_layer(layout, rows, bias=bias, input_grad=input_grad, rank=rank, wire=wire, name=name)
    p, k, ranks = layout.blocks, layout.ghosts, layout.ranks
    q, m_in, m_out, others = p // ranks, layout.block_in, layout.block_out, (p - 1) * k
    products = [
        Product("C x", "forward", q, rows, m_in, k),
        Product("L x", "forward", q, rows, m_in, m_out),
        Product("D g", "forward", q, rows, others, m_out),
        Product("D^T d", "backward", q, rows, m_out, others),
        Product("dL = d^T x", "backward", q, m_out, rows, m_in),
        Product("dD = d^T g", "backward", q, m_out, rows, others),
        Product("dC = h^T x", "backward", q, k, rows, m_in),
    ]
    meanwhile = ["dL = d^T x", "dD = d^T g"]
    if input_grad:
        products += [Product("L^T d", "backward", q, rows, m_out, m_in), Product("C^T h", "backward", q, rows, k, m_in)]
        meanwhile.append("L^T d")
    exchanges = [
        on_wire(Exchange("g", "forward", "all_gather", ranks, rows * q * k, ("L x",)), rows, wire),
        on_wire(Exchange("h", "backward", "reduce_scatter", ranks, rows * q * k, tuple(meanwhile)), rows, wire),
    ]
    parameters = [q * m_out * m_in, q * k * m_in, q * m_out * others]
    return _layer(name, parameters, products, exchanges, rows * q * m_in + rows * p * k, bias=bias * q * m_out)


def _two_level_layer(
    layout: BlockLayout, rows: int, *, bias: bool, input_grad: bool, rank: int, wire: WireFormat, name: str
) -> LayerCost:
    """The phantom layer with t ranks in each block: features exchanged inside, ghosts across blocks and then inside."""
    p, t, place, others = layout.blocks, layout.inside, layout.place_of(rank), (layout.blocks - 1) * layout.ghosts
    whole, m_in, m_out, k = layout.block_in, layout.block_in // t, layout.block_out // t, layout.ghosts // t
    products = [
        Product("L x, own features", "forward", 1, rows, m_in, m_out),
        Product("L x, features before", "forward", 1, rows, place * m_in, m_out),
        Product("L x, features after", "forward", 1, rows, (t - 1 - place) * m_in, m_out),
        Product("C x", "forward", 1, rows, whole, k),
        Product("D g", "forward", 1, rows, others, m_out),
        Product("D^T d", "backward", 1, rows, m_out, others),
        Product("dD = d^T g", "backward", 1, m_out, rows, others),
        Product("dL = d^T x", "backward", 1, m_out, rows, whole),
        Product("dC = h^T x", "backward", 1, k, rows, whole),
    ]
    meanwhile = "L^T d" if input_grad else "dL = d^T x"
    exchanges = [
        Exchange("x", "forward", "all_gather", t, rows * m_in, ("L x, own features",)),
        Exchange("g", "forward", "all_gather", p, rows * k, ("L x, features before", "L x, features after"), stride=t),
        Exchange("g inside", "forward", "all_gather", t, rows * p * k),
        Exchange("h inside", "backward", "reduce_scatter", t, rows * p * k, ("dD = d^T g",)),
        Exchange("h", "backward", "reduce_scatter", p, rows * k, (meanwhile,), stride=t),
    ]
    if input_grad:
        products.append(Product("L^T d", "backward", t, rows, m_out, m_in))
        products.append(Product("C^T h", "backward", t, rows, k, m_in))
        exchanges.append(Exchange("dx", "backward", "reduce_scatter", t, rows * m_in, ("dL = d^T x", "dC = h^T x")))
    exchanges = [on_wire(e, rows * (p if "inside" in e.term else 1), wire) for e in exchanges]
    parameters = [m_out * whole, k * whole, m_out * others]
    kept = rows * (m_in + whole + p * layout.ghosts)
    return _layer(name, parameters, products, exchanges, kept, bias=bias * m_out)


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
    """The paper's baseline, features cut in and out; on one rank it is the dense layer."""
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
    layout: RowLayout, rank: int, rows: int, *, bias: bool, input_grad: bool, wire: WireFormat, name: str
) -> LayerCost:
    """z = U (V x) + b: V cut by input features, U by output features, the values in between summed over ranks."""
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
    layout: RowLayout, rows: int, *, bias: bool, input_grad: bool, gather: bool, wire: WireFormat, name: str
) -> LayerCost:
    """First of a Megatron pair: whole features in, cut ones out; ``gather`` makes them whole, for a layer left over."""
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
    """Second of a Megatron pair: cut features in, whole ones out by an all-reduce. The bias is whole on every rank."""
    ranks, m_in, n_out = layout.ranks, layout.in_features // layout.ranks, layout.out_features
    products = [
        Product("W x", "forward", 1, rows, m_in, n_out),
        Product("W^T d", "backward", 1, rows, n_out, m_in),
        Product("dW = d^T x", "backward", 1, n_out, rows, m_in),
    ]
    exchanges = summed_on_wire("z", "forward", ranks, rows, n_out, wire)
    return _layer(name, [n_out * m_in], products, exchanges, rows * m_in, bias=bias * n_out, leading=n_out)


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

    @property
    def own(self) -> range:
        """The stage's layers."""
        return stage_layers(self.layers, self.stages, self.index)

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
        count, live = self.micro_batches, self.in_flight
        return replace(
            micro_batch,
            products=micro_batch.products * count,
            kept=micro_batch.kept * live,
            kept_bytes=micro_batch.kept_bytes * live,
            streamed=(micro_batch.streamed[0] * count, micro_batch.streamed[1] * count),
            calls=count,
        )

    def exchanges(self, words: int) -> tuple[Exchange, ...]:
        """What the stage sends, where a micro-batch's stream has so many words."""
        out = () if self.is_last else (Exchange("stream", "forward", "send", self.stages, words),)
        back = () if self.is_first else (Exchange("its gradient", "backward", "send", self.stages, words),)
        return (out + back) * self.micro_batches

    def kinds(self) -> dict[int, int]:
        """Stages that differ in work, each with the number of stages like it; it is the one that keeps most."""
        more = self.layers % self.stages
        larger = max(0, min(more, self.stages - 1) - 1)  # of the stages in between, those with a layer more
        smaller = max(0, self.stages - 2 - larger)
        kinds = [(0, 1), (1, larger), (max(1, more), smaller), (self.stages - 1, 1)]
        return {index: count for index, count in kinds if count}
