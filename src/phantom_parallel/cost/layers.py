"""Cost terms of the layers that models consist of: phantom, tensor parallel, and Megatron's columns and rows."""

from phantom_parallel.cost.terms import (
    Exchange,
    LayerCost,
    Product,
    between_ranks,
    on_wire,
    summed_on_wire,
)
from phantom_parallel.utils.layout import BlockLayout, RowLayout
from phantom_parallel.utils.strategies import WireFormat


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
    """The phantom map: ghosts out, ghosts in."""
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
        Exchange("g", "forward", "all_gather", ranks, rows * q * k, ("L x",)),
        Exchange("h", "backward", "reduce_scatter", ranks, rows * q * k, tuple(meanwhile)),
    ]
    parameters = [q * m_out * m_in, q * k * m_in, q * m_out * others] + ([q * m_out] if bias else [])
    kept = rows * q * m_in + rows * p * k
    exchanges = [on_wire(exchange, rows, wire) for exchange in exchanges]
    return LayerCost(name, tuple(parameters), tuple(products), between_ranks(exchanges), kept)


def _two_level_layer(
    layout: BlockLayout, rows: int, *, bias: bool, input_grad: bool, rank: int, wire: WireFormat, name: str
) -> LayerCost:
    """The phantom map with t ranks in each block: features exchanged inside, ghosts across blocks and then inside."""
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
    exchanges = [
        Exchange("x", "forward", "all_gather", t, rows * m_in, ("L x, own features",)),
        Exchange("g", "forward", "all_gather", p, rows * k, ("L x, features before", "L x, features after"), stride=t),
        Exchange("g inside", "forward", "all_gather", t, rows * p * k),
        Exchange("h inside", "backward", "reduce_scatter", t, rows * p * k, ("dD = d^T g",)),
    ]
    meanwhile = "L^T d" if input_grad else "dL = d^T x"
    exchanges.append(Exchange("h", "backward", "reduce_scatter", p, rows * k, (meanwhile,), stride=t))
    if input_grad:
        products += [
            Product("L^T d", "backward", t, rows, m_out, m_in),
            Product("C^T h", "backward", t, rows, k, m_in),
        ]
        exchanges.append(Exchange("dx", "backward", "reduce_scatter", t, rows * m_in, ("dL = d^T x", "dC = h^T x")))
    parameters = [m_out * whole, k * whole, m_out * others] + ([m_out] if bias else [])
    kept = rows * (m_in + whole + p * layout.ghosts)
    products = [product for product in products if product.multiply_adds]
    exchanges = [on_wire(e, rows * (p if "inside" in e.term else 1), wire) for e in exchanges]
    return LayerCost(name, tuple(parameters), tuple(products), between_ranks(exchanges), kept)


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
    parameters = [m_out * n_in] + ([m_out] if bias else [])
    products = [product for product in products if product.multiply_adds]
    leading = (m_out,) * len(parameters)
    return LayerCost(name, tuple(parameters), tuple(products), between_ranks(exchanges), rows * n_in, leading=leading)


def low_rank_layer(
    layout: RowLayout,
    rank: int,
    rows: int,
    *,
    bias: bool,
    input_grad: bool,
    wire: WireFormat = "full",
    name: str = "",
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
    parameters = [rank * m_in, m_out * rank] + ([m_out] if bias else [])
    leading = (rank, m_out, m_out)[: len(parameters)]
    kept = rows * (m_in + rank)
    return LayerCost(name, tuple(parameters), tuple(products), between_ranks(exchanges), kept, leading=leading)


def column_layer(
    layout: RowLayout,
    rows: int,
    *,
    bias: bool,
    input_grad: bool,
    gather: bool,
    wire: WireFormat = "full",
    name: str = "",
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
    parameters = [m_out * n_in] + ([m_out] if bias else [])
    leading = (m_out,) * len(parameters)
    return LayerCost(name, tuple(parameters), tuple(products), between_ranks(exchanges), rows * n_in, leading=leading)


def row_layer(layout: RowLayout, rows: int, *, bias: bool, wire: WireFormat = "full", name: str = "") -> LayerCost:
    """Second of a Megatron pair: cut features in, whole ones out by an all-reduce. The bias is whole on every rank."""
    ranks, m_in, n_out = layout.ranks, layout.in_features // layout.ranks, layout.out_features
    products = [
        Product("W x", "forward", 1, rows, m_in, n_out),
        Product("W^T d", "backward", 1, rows, n_out, m_in),
        Product("dW = d^T x", "backward", 1, n_out, rows, m_in),
    ]
    exchanges = summed_on_wire("z", "forward", ranks, rows, n_out, wire)
    parameters = [n_out * m_in] + ([n_out] if bias else [])
    leading = (n_out,) * len(parameters)
    return LayerCost(name, tuple(parameters), tuple(products), between_ranks(exchanges), rows * m_in, leading=leading)
