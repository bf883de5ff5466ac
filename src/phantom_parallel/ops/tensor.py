"""Conventional tensor parallelism in the same layout: the paper's baseline.

Features are sharded over R ranks; this rank holds m_in = n_in / R input features and m_out = n_out / R output features,
and with these the rows W (m_out, n_in) of the weight.

    z  = W x + b            with the features x of all ranks: one all-gather
    dx = W^T d              with d = dLoss/dz; summed over ranks, one reduce-scatter
    dW = d^T x     db = sum d

Both collectives carry full activations, B x m_in words per rank, where the phantom map carries B x q k.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phantom_parallel.ops.blocks import (
    add_product,
    apply_function,
    cast_for_autocast,
    check_operands,
    is_transformed,
    merge_blocks,
    split_blocks,
    unflatten_rows,
)
from phantom_parallel.ops.collectives import (
    SINGLE_RANK,
    RankGroup,
    check_output_grad,
    finish,
    start_all_gather,
    start_reduce_scatter,
)


def tensor_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group: RankGroup = SINGLE_RANK) -> Tensor:
    """z = W x + b, features sharded over ``group``. Forward: all-gather of x; backward: reduce-scatter of its gradient.

    ``x`` is (..., m_in), this rank's features; the result is (..., m_out).
    """
    check_operands(x, weight)
    x, weight, bias = cast_for_autocast(x, weight, bias)
    if is_transformed() and group.size == 1:
        return F.linear(x, weight, bias)
    return unflatten_rows(apply_function(_TensorLinear, x.reshape(-1, x.shape[-1]), weight, bias, group), x)


class _TensorLinear(Function):
    """Forward overlaps the exchange with the product of this rank's own features; backward with dW and db. Saved: the
    gathered x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: RankGroup) -> Tensor:
        own = group.rank * x.shape[1]
        end = own + x.shape[1]
        pending = start_all_gather(x, group)  # (R, B, m_in), in flight
        z = torch.mm(x, weight[:, own:end].t())  # (B, m_out), overlapped
        gathered = x if group.size == 1 else merge_blocks(finish(pending).values)  # (B, n_in)
        if group.size > 1:
            z = add_product(z, gathered[:, :own], weight[:, :own].t())
            z = add_product(z, gathered[:, end:], weight[:, end:].t())
            if group.wire != "full":
                gathered[:, own:end] = x  # the product used it as it is

        x_grad, weight_grad, _ = ctx.needs_input_grad[:3]
        ctx.save_for_backward(gathered if weight_grad else None, weight if x_grad else None)
        ctx.group = group
        return z if bias is None else z.add_(bias)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        gathered, weight = ctx.saved_tensors
        group = ctx.group
        check_output_grad(d, group)
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        dx = d_weight = d_bias = None

        if need_x:
            # One product per rank, so that the slices have the layout of the exchange.
            slices = torch.bmm(d.expand(group.size, *d.shape), split_blocks(weight, group.size))  # (R, B, m_in)
            pending = start_reduce_scatter(slices, group)
        if need_weight:
            d_weight = torch.mm(d.t(), gathered)  # (m_out, n_in), overlapped
        if need_bias:
            d_bias = d.sum(0)  # (m_out)
        if need_x:
            dx = finish(pending).values  # (B, m_in)
        return dx, d_weight, d_bias, None
