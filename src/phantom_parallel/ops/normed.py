"""RMSNorm on features that are sharded over ranks, without a collective of its own.

    r = 1 / sqrt(sum_j |x_j|^2 / n + eps)      one number per row, over the features of all blocks
    y = W (r w x) = r W (w x)                  with the norm's weight w, one number per feature

w x is local. r needs the sum of squares over all ranks, but as it is one number per row, it can be applied after the
matrix product: the squares are sent along with the product's own exchange, as one more ghost. Backward, with d =
dLoss/dy and u = w x,

    t   = sum d y                              over the features of all ranks: sent along with the reduce-scatter
    du  = W^T d                                the product's own backward, without r
    dw  = sum r x du                           over rows
    dx  = r (w du - r x t / n)

Both sums are exact columns of their exchange (`ops.collectives`): the squares are float32 or better, independent of the
dtype of the products and of the wire format, and t too except where it is summed with gradients of shorter words.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phantom_parallel.ops.blocks import (
    apply_function,
    cast_for_autocast,
    check_operands,
    is_creating_graph,
    is_transformed,
    matmul_blocks,
    matmul_blocks_t,
    merge_blocks,
    merge_result,
    recorded_grads,
    split_blocks,
    weight_grad,
)
from phantom_parallel.ops.collectives import (
    SINGLE_RANK,
    RankGroup,
    check_output_grad,
    finish_all_gather,
    finish_reduce_scatter,
    start_all_gather,
    start_reduce_scatter,
)
from phantom_parallel.ops.features import gather_features
from phantom_parallel.ops.levels import Group, TwoLevelGroup, all_gather, everyone, reduce_scatter
from phantom_parallel.ops.phantom import ghosts_of_others, phantom_linear, sum_by_source
from phantom_parallel.ops.rms import inverse_rms, norm_grads, partial_t, squares_of
from phantom_parallel.ops.two_level_normed import TwoLevelNormedLinear


def normed_phantom_linear(
    x: Tensor,
    norm: Tensor,
    local: Tensor,
    compress: Tensor,
    decompress: Tensor,
    *,
    eps: float,
    blocks: int,
    group: Group = SINGLE_RANK,
) -> Tensor:
    """RMSNorm, then the phantom map L + D C. Forward: all-gather of ghosts and squares; backward: reduce-scatter.

    ``x`` is (..., q m_in), this rank's features, and ``norm`` (q m_in) their weights; the result is (..., q m_out), in
    the dtype of the map's weights. With a `TwoLevelGroup` several ranks share a block, as in `phantom_linear`.
    """
    check_operands(x, local)
    local, compress, decompress = cast_for_autocast(local, compress, decompress)
    rows = x.reshape(-1, x.shape[-1])
    if is_transformed() and group.size == 1:
        y = _composed_phantom(rows, norm, local, compress, decompress, eps, blocks, group)
    elif isinstance(group, TwoLevelGroup):
        y = apply_function(TwoLevelNormedLinear, rows, norm, local, compress, decompress, eps, group)
    else:
        y = apply_function(_NormedPhantomLinear, rows, norm, local, compress, decompress, eps, blocks, group)
    return y.view(*x.shape[:-1], y.shape[-1])


def gather_normed(x: Tensor, norm: Tensor, *, eps: float, group: Group = SINGLE_RANK) -> Tensor:
    """RMSNorm and gather of all features. Forward: all-gather of features and squares; backward: reduce-scatter.

    ``x`` is (..., m), this rank's features; the result is (..., R m). Each rank's gradient of it is partial: it is the
    input of work that is split over ranks, such as a vocabulary-parallel head.
    """
    check_operands(x, norm)
    dtype = cast_for_autocast(x)[0].dtype
    rows = x.reshape(-1, x.shape[-1])
    if is_transformed() and group.size == 1:
        y = composed_gather(rows, norm, eps, group, dtype)
    else:
        y = apply_function(_GatherNormed, rows, norm, eps, group, dtype)
    return y.view(*x.shape[:-1], y.shape[-1])


class _NormedPhantomLinear(Function):
    """Forward overlaps the exchange with L u, backward with dL, dD and L^T d. Saved: x, y, r and all ghosts."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm: Tensor,
        local: Tensor,
        compress: Tensor,
        decompress: Tensor,
        eps: float,
        blocks: int,
        group: RankGroup,
    ) -> Tensor:
        q, features = blocks // group.size, x.shape[1] * group.size
        us = split_blocks((x * norm).to(local.dtype), q)  # w x: (q, B, m_in)
        ghosts = merge_blocks(matmul_blocks(us, compress))  # g: (B, q k)
        pending = start_all_gather(ghosts, group, squares_of(x))  # in flight
        ys = matmul_blocks(us, local)  # L u: (q, B, m_out), overlapped
        gathered, squares = finish_all_gather(pending, group)  # (R, B, q k), (R, B, 1)
        ys = matmul_blocks(ghosts_of_others(gathered, blocks, group), decompress, add_to=ys)  # + D g
        r = (squares.sum(0) / features + eps).rsqrt()  # (B, 1)
        y = merge_result(ys).mul_(r)  # (B, q m_out)
        ctx.save_for_backward(x, norm, local, compress, decompress, gathered, r, y)
        ctx.eps, ctx.blocks, ctx.group = eps, blocks, group
        return y

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        x, norm, local, compress, decompress, gathered, r, y = ctx.saved_tensors
        blocks, group = ctx.blocks, ctx.group
        need_x, need_norm, need_local, need_compress, need_decompress = ctx.needs_input_grad[:5]
        check_output_grad(d, group)
        if is_creating_graph():  # the saved results have no graph: a second derivative goes through the composed form
            inputs = (x, norm, local, compress, decompress)
            return *recorded_grads(_composed_phantom, inputs, ctx.eps, blocks, group, d=d), None, None, None
        q = blocks // group.size
        dx = d_norm = d_local = d_compress = d_decompress = None

        ds = split_blocks(d, q)  # (q, B, m_out)
        needs_h = need_x or need_norm or need_compress
        if needs_h:
            h = sum_by_source(matmul_blocks_t(ds, decompress), blocks, group)  # partial h: (R, B, q k)
            pending = start_reduce_scatter(h, group, partial_t(d, y))  # in flight
        xr = x * r  # (B, q m_in)
        us = split_blocks((xr * norm).to(local.dtype), q)  # r w x: (q, B, m_in), so that d needs no r
        if need_local:
            d_local = weight_grad(ds, us)  # (q m_out, m_in), overlapped
        if need_decompress:
            d_decompress = weight_grad(
                ds, ghosts_of_others((gathered * r).to(d.dtype), blocks, group)
            )  # (q m_out, (p-1) k)
        if need_x or need_norm:
            dus = matmul_blocks_t(ds, local)  # L^T d: (q, B, m_in)
        if needs_h:
            own, t = finish_reduce_scatter(pending, group)  # (B, q k), (B, 1)
            hs = split_blocks(own, q)  # h: (q, B, k)
            if need_compress:
                d_compress = weight_grad(hs, us)  # (q k, m_in)
            if need_x or need_norm:
                du = merge_blocks(matmul_blocks_t(hs, compress, add_to=dus))  # + C^T h
                dx, d_norm = norm_grads(du, x, xr, norm, r, t, group)
        return dx, d_norm, d_local, d_compress, d_decompress, None, None, None


class _GatherNormed(Function):
    """r arrives together with the features and is applied to them immediately. Saved: x, r and the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Tensor, eps: float, group: Group, dtype: torch.dtype) -> Tensor:
        width = x.shape[1]
        gathered, squares = all_gather((x * norm).to(dtype), group, squares_of(x))  # (R, B, m), (R, B, 1)
        r = (squares.sum(0) / (width * group.size) + eps).rsqrt()
        y = (merge_blocks(gathered) * r).to(dtype)  # (B, R m)
        ctx.save_for_backward(x, norm, r, y)
        ctx.eps, ctx.group = eps, group
        return y

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        x, norm, r, y = ctx.saved_tensors
        group: Group = ctx.group
        check_output_grad(d, everyone(group))
        if is_creating_graph():
            return *recorded_grads(composed_gather, (x, norm), ctx.eps, group, y.dtype, d=d), None, None, None
        du, t = reduce_scatter(split_blocks(d, group.size), group, partial_t(d, y))  # (B, m), (B, 1)
        return *norm_grads(du, x, x * r, norm, r, t, group), None, None, None


def _composed_phantom(
    x: Tensor,
    norm: Tensor,
    local: Tensor,
    compress: Tensor,
    decompress: Tensor,
    eps: float,
    blocks: int,
    group: Group,
) -> Tensor:
    """`normed_phantom_linear` from differentiable parts, with one more exchange."""
    u = (x * norm).to(local.dtype)  # (B, q m_in)
    y = phantom_linear(u, local, compress, decompress, blocks=blocks, group=group)  # (B, q m_out)
    return (y * inverse_rms(x, eps, group)).to(y.dtype)


def composed_gather(x: Tensor, norm: Tensor, eps: float, group: Group, dtype: torch.dtype) -> Tensor:
    """`gather_normed` from differentiable parts, with one more exchange."""
    gathered = gather_features((x * norm).to(dtype), group, partial_grad=True)  # (B, R m)
    return (gathered * inverse_rms(x, eps, group)).to(dtype)
