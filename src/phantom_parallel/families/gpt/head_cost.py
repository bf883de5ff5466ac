"""Cost terms of a transformer's head and loss. Of R ranks that cut the stream by features, each takes

    by vocabulary   all T rows and V / R tokens   all-gather  m + 1    reduce-scatter  m + 1    loss: all-gather  3
    by rows         T / R rows and all V tokens   all-to-all  m + 1    all-to-all  m + 1        loss: one number

in words a row, m = n / R; by rows with 1 / R of the rows, and the weight's V n / R words gathered and its gradient
scattered besides. `head_splits_rows` chooses for training; inference needs the last position's logits of all tokens. By
vocabulary, a tied head has besides an all-to-all of the embedding's weight, forward and backward.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from phantom_parallel.cost.terms import (
    Exchange,
    LayerCost,
    Product,
    between_ranks,
    in_turns,
    on_wire,
    over_blocks,
    summed_on_wire,
)
from phantom_parallel.utils.wire import head_splits_rows

if TYPE_CHECKING:
    from phantom_parallel.families.gpt.cost import GPTShape

INDEX_BYTES = 8  # of a token


def head_cost(shape: "GPTShape") -> LayerCost:
    """The norm, the map to logits, and the loss or the last position's logits."""
    return _by_rows(shape) if splits_rows(shape) else _by_vocabulary(shape)


def head_in_turns(shape: "GPTShape", part: "GPTShape") -> LayerCost:
    """The same for sequences in parts, which share the head's weight."""
    by_rows = splits_rows(shape)
    here = shape.vocab // shape.ranks * shape.dim if shape.exchanges_rows else 0
    shared = shape.vocab * shape.dim if by_rows else here
    each = _by_rows(part) if by_rows else _by_vocabulary(part)
    cost = in_turns(replace(each, kept=each.kept - shared), shape.interleave, once=("W", "dW"))
    return replace(cost, kept=cost.kept + shared)


def splits_rows(shape: "GPTShape") -> bool:
    """Whether the loss is computed by rows."""
    if shape.strategy != "phantom" or shape.mode != "train" or shape.inside > 1:
        return False
    words = {"word_bytes": shape.word_bytes, "weight_bytes": shape.word_bytes, "parts": shape.interleave}
    return head_splits_rows(shape.rows, shape.dim, shape.vocab, shape.ranks, wire=shape.wire, **words)


def _by_rows(shape: "GPTShape") -> LayerCost:
    ranks, dim, vocab = shape.ranks, shape.dim, shape.vocab
    rows, weight = shape.rows // ranks, vocab * dim // ranks
    y = Exchange("y", "forward", "all_to_all", ranks, rows * shape.stream)
    dy = Exchange("dy", "backward", "all_to_all", ranks, rows * shape.stream, ("dW = d^T y",))
    y, dy = (shape.with_sums(on_wire(e, rows, shape.wire), rows) for e in (y, dy))
    return LayerCost(
        name="head",
        parameters=_parameters(shape),
        products=_products(rows, dim, vocab),
        exchanges=(
            Exchange("W", "forward", "all_gather", ranks, weight, background=True),
            y,
            Exchange("loss", "forward", "all_gather", ranks, shape.precise_words),
            dy,
            Exchange("dW", "backward", "reduce_scatter", ranks, weight, background=True),
        ),
        kept=rows * dim + shape.rows * shape.stream + vocab * dim,
        # log-probabilities and r of each row, all targets, the sum of their weights, and how many count
        kept_bytes=rows * (vocab + 1) * shape.precise_bytes + (shape.rows + 1) * INDEX_BYTES + shape.precise_bytes,
        streamed=_streamed(rows, dim, vocab),
    )


def _by_vocabulary(shape: "GPTShape") -> LayerCost:
    rows = shape.rows if shape.mode == "train" else shape.batch
    here, ranks, dim, wire = shape.vocab // shape.ranks, shape.ranks, shape.dim, shape.wire
    phantom = shape.strategy == "phantom"
    exchanges = []
    if shape.exchanges_rows and shape.mode != "decode":
        piece = here * dim // ranks
        exchanges.append(Exchange("W", "forward", "all_to_all", ranks, piece))
        exchanges.append(Exchange("dW", "backward", "all_to_all", ranks, piece))
    if phantom:
        gathered = Exchange("y", "forward", "all_gather", ranks, rows * shape.stream)
        scattered = Exchange("dy", "backward", "reduce_scatter", ranks, rows * shape.stream, ("dW = d^T y",))
        whole = [shape.with_sums(on_wire(e, rows, wire), rows) for e in (gathered, scattered)]
        exchanges += [part for e in whole for part in over_blocks(e, shape.blocks)]
    else:
        exchanges += summed_on_wire("dy", "backward", ranks, rows, dim, wire, ("dW = d^T y",))
    if shape.mode == "train":
        last = Exchange("loss", "forward", "all_gather", ranks, rows * 3 * shape.precise_words)
    else:
        last = on_wire(Exchange("logits", "forward", "all_gather", ranks, rows * here), rows, wire)
    exchanges += over_blocks(last, shape.blocks)
    kept = rows * dim + (rows * shape.stream if phantom else 0) + (here * dim if shape.exchanges_rows else 0)
    return LayerCost(
        name="head",
        parameters=_parameters(shape),
        products=_products(rows, dim, here),
        exchanges=between_ranks(exchanges),
        kept=kept,
        kept_bytes=_loss_bytes(shape) + (0 if phantom else shape.norm_bytes(rows)),
        streamed=_streamed(rows, dim, here),
        leading=(shape.stream, here)[: len(_parameters(shape))],
    )


def _parameters(shape: "GPTShape") -> tuple[int, ...]:
    weight = () if shape.tie_embeddings else (shape.vocab // shape.ranks * shape.dim,)
    return (shape.stream, *weight)


def _products(rows: int, dim: int, tokens: int) -> tuple[Product, ...]:
    return (
        Product("W y", "forward", 1, rows, dim, tokens),
        Product("dW = d^T y", "backward", 1, tokens, rows, dim),
        Product("W^T d", "backward", 1, rows, tokens, dim),
    )


def _streamed(rows: int, dim: int, tokens: int) -> tuple[int, int]:
    return rows * (2 * dim + 3 * tokens), rows * (3 * dim + 3 * tokens)


def _loss_bytes(shape: "GPTShape") -> int:
    """Weights of the logits, and of each row the norm's r, the target, and on ranks what scales the weights and whether
    the target is here.
    """
    precise, several = shape.precise_bytes, shape.ranks > 1
    row = shape.vocab // shape.ranks * precise + precise + INDEX_BYTES
    return shape.rows * (row + (precise + 1 if several else 0)) + (0 if several else precise)
