"""Cost terms of a transformer's embedding and layers; `cost` has the table of what they exchange."""

from dataclasses import replace
from typing import TYPE_CHECKING

from phantom_parallel.cost.layers import column_layer, phantom_layer, row_layer
from phantom_parallel.cost.terms import LayerCost, Product, between_ranks, recomputed, summed_on_wire
from phantom_parallel.families.gpt.head_cost import INDEX_BYTES
from phantom_parallel.utils.layout import BlockLayout, RowLayout

if TYPE_CHECKING:
    from phantom_parallel.families.gpt.cost import GPTShape


def embedding_cost(shape: "GPTShape") -> LayerCost:
    """No product: rows of the weight are looked up. Cut by rows, each rank has those of some tokens only, and torch
    gives the gradient of all rows to each, unless a tied head adds its own.
    """
    exchanges = []
    if shape.strategy == "megatron":
        exchanges += summed_on_wire("x", "forward", shape.ranks, shape.rows, shape.dim, shape.wire)
    weight = shape.vocab * shape.dim // shape.ranks
    words = shape.rows * shape.stream
    by_rows = shape.strategy == "megatron" and shape.ranks > 1
    by_torch, masks = by_rows and shape.wire == "full", by_rows and shape.wire != "full"
    return LayerCost(
        name="embedding",
        parameters=(weight,),
        products=(),
        exchanges=between_ranks(exchanges),
        kept=0,
        kept_bytes=shape.rows * (INDEX_BYTES + (1 if masks else 0)),
        streamed=(2 * words, 2 * words),
        leading=(shape.vocab,),
        whole_gradients=(weight * shape.ranks,) if by_torch and not shape.tie_embeddings else (),
    )


def layer_costs(
    shape: "GPTShape", to_qkv: int | None, to_out: int | None, to_gate_up: int | None, to_down: int | None
) -> tuple[LayerCost, ...]:
    """The parts of a layer whose maps have these numbers of ghosts."""
    features = shape.config.qkv_features
    parts: tuple[LayerCost, ...]
    if shape.parallel_block:
        both = _into(shape, "qkv_gate_up", features + 2 * shape.hidden, to_qkv)
        back = _back(shape, "out_down", shape.dim + shape.hidden, to_out)
        parts = both, _attention(shape), _swiglu(shape, back)
    else:
        qkv = _into(shape, "attention.qkv", features, to_qkv, bias=shape.qkv_bias)
        out = _back(shape, "attention.out", shape.dim, to_out)
        gate_up = _into(shape, "mlp.gate_up", 2 * shape.hidden, to_gate_up)
        down = _back(shape, "mlp.down", shape.hidden, to_down)
        parts = qkv, _attention(shape), out, gate_up, _swiglu(shape, down)
    if not shape.recompute or shape.mode != "train":
        return parts
    # What a layer ends with need not be computed again where backward asks for its input only, as a plain product's
    # does; the phantom map's asks for the gathered ghosts as well.
    ends = len(parts) if shape.strategy == "phantom" else len(parts) - 1
    again = [recomputed(part) if index < ends else part for index, part in enumerate(parts)]
    kept = shape.rows * shape.stream  # what enters the layer
    return tuple(replace(part, kept=0 if index else kept, kept_bytes=0) for index, part in enumerate(again))


def _into(shape: "GPTShape", name: str, out_features: int, ghosts: int | None, *, bias: bool = False) -> LayerCost:
    """A norm and the map after it: from the stream to features that are cut between heads or pieces."""
    rows, stream = shape.rows, shape.stream
    statistics = rows * shape.precise_bytes  # r of each row
    streamed = (5 * rows * stream, 6 * rows * stream)  # the norm, and the sum into the stream
    if shape.strategy != "phantom":
        whole = column_layer(
            RowLayout(shape.dim, out_features, shape.ranks),
            rows,
            bias=bias,
            input_grad=True,
            gather=False,
            wire=shape.wire,
            name=name,
        )
        statistics += shape.norm_bytes(rows)
        parameters, leading = (stream, *whole.parameters), (stream, *whole.leading)
        return replace(whole, parameters=parameters, leading=leading, kept_bytes=statistics, streamed=streamed)
    blocks = _blocks(shape, shape.dim, out_features, ghosts)
    plain = phantom_layer(blocks, rows, bias=bias, rank=shape.rank, wire=shape.wire, name=name)
    if shape.ranks > 1 and shape.inside == 1 and shape.wire == "full":
        statistics += rows * shape.ranks * shape.precise_bytes  # squares, in the message that the ghosts are kept in
    carried = ("x", "g", "h", "dx")
    return replace(
        plain,
        parameters=(stream, *plain.parameters),
        exchanges=tuple(shape.with_sums(e, rows) if e.term in carried else e for e in plain.exchanges),
        kept=plain.kept + rows * out_features // shape.ranks,
        kept_bytes=statistics,
        streamed=streamed,
    )


def _back(shape: "GPTShape", name: str, in_features: int, ghosts: int | None) -> LayerCost:
    """A map from such features back to the stream."""
    if shape.strategy == "phantom":
        blocks = _blocks(shape, in_features, shape.dim, ghosts)
        return phantom_layer(blocks, shape.rows, bias=False, rank=shape.rank, wire=shape.wire, name=name)
    return row_layer(RowLayout(in_features, shape.dim, shape.ranks), shape.rows, bias=False, wire=shape.wire, name=name)


def _blocks(shape: "GPTShape", in_features: int, out_features: int, ghosts: int | None) -> BlockLayout:
    assert shape.blocks is not None
    assert ghosts is not None
    return BlockLayout(in_features, out_features, shape.blocks, ghosts, shape.ranks)


def _attention(shape: "GPTShape") -> LayerCost:
    """Scores of each head of this rank, and the sums of values they weigh; the turning of queries and keys."""
    heads, head_dim, group = shape.heads_here, shape.config.head_dim, shape.config.queries_per_kv
    each, t, s = shape.batch * heads, shape.sequence, shape.past + shape.sequence
    products = (
        Product("Q K^T", "forward", each, t, head_dim, s),
        Product("A V", "forward", each, t, s, head_dim),
        Product("Q K^T again", "backward", each, t, head_dim, s),
        Product("dA = d V^T", "backward", each, t, head_dim, s),
        Product("dV = A^T d", "backward", each, s, t, head_dim),
        Product("dQ = dS K", "backward", each, t, s, head_dim),
        Product("dK = dS^T Q", "backward", each, s, t, head_dim),
    )
    q, kv = shape.rows * heads * head_dim, shape.rows * shape.kv_here * head_dim
    cached = shape.batch * s * shape.kv_here * head_dim
    copied = q if group > 1 and shape.kv_here > 1 else 0  # queries, out of what was turned with the keys
    copied += q if shape.parallel_block else 0  # the result, which is copied beside the hidden features
    # Values lie in what qkv gave, which phantom keeps anyway, unless a bias was added to it.
    raw = 0 if shape.strategy == "phantom" and not shape.qkv_bias else q + 2 * kv
    turning = 7 * (q + kv)
    return LayerCost(
        name="attention",
        parameters=(),
        products=products,
        exchanges=(),
        kept=q + kv + copied + raw,  # the result is the next map's input
        kept_bytes=shape.rows * heads * shape.precise_bytes,
        streamed=(2 * q + 2 * cached + turning, 4 * q + 4 * cached + turning),
        fused=True,
    )


def _swiglu(shape: "GPTShape", down: LayerCost) -> LayerCost:
    """The map back, with silu(gate) up before it."""
    words = shape.rows * shape.hidden_here
    raw = 0 if shape.strategy == "phantom" else 2 * words  # gate and up, which phantom keeps anyway
    return replace(down, kept=down.kept + words + raw, streamed=(5 * words, 8 * words))
