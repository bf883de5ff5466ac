"""Conventional tensor parallelism in the same layout: the paper's baseline.

Features are cut over R ranks; this rank holds m_in = n_in / R of those that come in and m_out = n_out / R of those that
go out, and with them the rows W (m_out, n_in) of the weight.

    z  = W x + b            x: the features of all ranks, one all-gather
    dx = W^T d              with d = dLoss/dz; summed over ranks, one reduce-scatter
    dW = d^T x     db = sum d

Both exchanges carry whole activations, B x m_in words a rank, where the phantom map carries B x q k.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phantom_parallel.ops.blocks import add_product, apply, cast_for_autocast, cut, join, records_graph
from phantom_parallel.ops.collectives import (
    ALONE,
    Ranks,
    finish_all_gather,
    finish_reduce_scatter,
    start_all_gather,
    start_reduce_scatter,
)


def tensor_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, ranks: Ranks = ALONE) -> Tensor:
    """z = W x + b with features cut over ``ranks``. Forward: all-gather of x; backward: reduce-scatter of its gradient.

    ``x`` is (..., m_in), this rank's features; the result is (..., m_out).
    """
    x, weight, bias = cast_for_autocast(x, weight, bias)
    z: Tensor = apply(_TensorLinear, x.reshape(-1, x.shape[-1]), weight, bias, ranks)
    return z.view(*x.shape[:-1], z.shape[-1])


class _TensorLinear(Function):
    """Forward overlaps the exchange with the product of this rank's own features; backward with dW and db. Kept for
    backward: gathered x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ranks: Ranks) -> Tensor:
        own = ranks.rank * x.shape[1]
        end = own + x.shape[1]
        pending = start_all_gather(x, ranks)  # (R, B, m_in), on its way
        z = torch.mm(x, weight[:, own:end].t())  # (B, m_out), meanwhile
        gathered = x if ranks.size == 1 else join(finish_all_gather(pending, ranks))  # (B, n_in)
        if ranks.size > 1:
            z = add_product(z, gathered[:, :own], weight[:, :own].t())
            z = add_product(z, gathered[:, end:], weight[:, end:].t())

        x_grad, weight_grad, _ = ctx.needs_input_grad[:3]
        ctx.save_for_backward(gathered if weight_grad else None, weight if x_grad else None)
        ctx.ranks = ranks
        return z if bias is None else z.add_(bias)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        gathered, weight = ctx.saved_tensors
        ranks = ctx.ranks
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        dx = d_weight = d_bias = None

        if need_x:
            # One product for each rank's slice, so that the slices lie as the exchange wants them.
            slices = torch.bmm(d.expand(ranks.size, *d.shape), cut(weight, ranks.size))  # (R, B, m_in)
            pending = start_reduce_scatter(slices, ranks)
        if need_weight:
            if records_graph() and need_x and ranks.size > 1:  # what was kept has no history
                raise RuntimeError(
                    "tensor_linear cannot be differentiated twice across ranks: run on one, or use phantom_linear"
                )
            d_weight = torch.mm(d.t(), gathered)  # (m_out, n_in), meanwhile
        if need_bias:
            d_bias = d.sum(0)  # (m_out)
        if need_x:
            dx = finish_reduce_scatter(pending, ranks)  # (B, m_in)
        return dx, d_weight, d_bias, None
