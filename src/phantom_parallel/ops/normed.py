"""RMSNorm on features that are cut over ranks, with no exchange of its own.

    r = 1 / sqrt(sum_j |x_j|^2 / n + eps)      one number a row, over the features of all blocks
    y = W (r w x) = r W (w x)                  w: the norm's weight, one number a feature

w x is at home. r needs the sum of squares over all ranks, but as it is one number a row, it can wait until after the
matrix product: so the squares travel with whatever the product exchanges anyway, as one more ghost. Backward, with d =
dLoss/dy and u = w x,

    t   = sum d y                              over the features of all ranks: it travels with the reduce-scatter
    du  = W^T d                                what the product's own backward gives, r left out
    dw  = sum r x du                           over rows
    dx  = r (w du - r x t / n)

The squares are float32 or better, whatever the products are in: in an exchange of shorter words one takes two columns,
bit for bit. t is rounded as the gradients are that it travels with.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phantom_parallel.ops.blocks import (
    apply,
    cast_for_autocast,
    cut,
    join,
    records_graph,
    times,
    transposed_times,
    weight_grad,
)
from phantom_parallel.ops.collectives import (
    ALONE,
    Ranks,
    finish_all_gather,
    finish_reduce_scatter,
    start_all_gather,
    start_reduce_scatter,
)
from phantom_parallel.ops.phantom import others, to_sources


def normed_phantom_linear(
    x: Tensor,
    norm: Tensor,
    local: Tensor,
    compress: Tensor,
    decompress: Tensor,
    *,
    eps: float,
    blocks: int,
    ranks: Ranks = ALONE,
) -> Tensor:
    """RMSNorm, then the phantom map L + D C. Forward: all-gather of ghosts and squares; backward: reduce-scatter.

    ``x`` is (..., q m_in), this rank's features, and ``norm`` (q m_in) their weights; the result is (..., q m_out), in
    the dtype of the map's weights.
    """
    local, compress, decompress = cast_for_autocast(local, compress, decompress)
    rows = x.reshape(-1, x.shape[-1])
    y: Tensor = apply(_NormedPhantomLinear, rows, norm, local, compress, decompress, eps, blocks, ranks)
    return y.view(*x.shape[:-1], y.shape[-1])


def gather_normed(x: Tensor, norm: Tensor, *, eps: float, ranks: Ranks = ALONE) -> Tensor:
    """RMSNorm and all features of it: forward: all-gather of features and squares; backward: reduce-scatter.

    ``x`` is (..., m), this rank's features; the result is (..., R m), and each rank's gradient of it is a part of the
    sum: it leads into work that is split over ranks, such as a vocabulary-parallel head.
    """
    (like,) = cast_for_autocast(x)
    y: Tensor = apply(_GatherNormed, x.reshape(-1, x.shape[-1]), norm, eps, ranks, like.dtype)
    return y.view(*x.shape[:-1], y.shape[-1])


class _NormedPhantomLinear(Function):
    """Forward overlaps the exchange with L u, backward with dL, dD and L^T d. Kept: x, y, r and the gathered ghosts."""

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
        ranks: Ranks,
    ) -> Tensor:
        q, features = blocks // ranks.size, x.shape[1] * ranks.size
        us = cut((x * norm).to(local.dtype), q)  # w x: (q, B, m_in)
        ghosts = join(times(us, compress))  # g: (B, q k)
        pending = start_all_gather(_with_squares(ghosts, x), ranks)  # on their way
        ys = times(us, local)  # L u: (q, B, m_out), meanwhile
        gathered, squares = _without_squares(finish_all_gather(pending, ranks), ghosts.shape[1])  # (R, B, q k), (B, 1)
        ys = times(others(gathered, blocks, ranks), decompress, add_to=ys)  # + D g
        r = (squares / features + eps).rsqrt()  # (B, 1)
        y = join(ys).mul_(r)  # (B, q m_out)
        ctx.save_for_backward(x, norm, local, compress, decompress, gathered, r, y)
        ctx.blocks, ctx.ranks = blocks, ranks
        return y

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        x, norm, local, compress, decompress, gathered, r, y = ctx.saved_tensors
        blocks, ranks = ctx.blocks, ctx.ranks
        need_x, need_norm, need_local, need_compress, need_decompress = ctx.needs_input_grad[:5]
        _refuse_second_derivative("normed_phantom_linear")
        q = blocks // ranks.size
        dx = d_norm = d_local = d_compress = d_decompress = None

        ds = cut(d, q)  # (q, B, m_out)
        needs_h = need_x or need_norm or need_compress
        if needs_h:
            h = to_sources(transposed_times(ds, decompress), blocks, ranks)  # this rank's part of h: (R, B, q k)
            pending = start_reduce_scatter(_with_part(h, d, y), ranks)  # on their way
        xr = x * r  # (B, q m_in)
        us = cut((xr * norm).to(local.dtype), q)  # r w x: (q, B, m_in), so that d may stay without r
        if need_local:
            d_local = weight_grad(ds, us)  # (q m_out, m_in), meanwhile
        if need_decompress:
            d_decompress = weight_grad(ds, others((gathered * r).to(d.dtype), blocks, ranks))  # (q m_out, (p-1) k)
        if need_x or need_norm:
            dus = transposed_times(ds, local)  # L^T d: (q, B, m_in)
        if needs_h:
            arrived = finish_reduce_scatter(pending, ranks)  # (B, q k + 1)
            hs, t = cut(arrived[:, :-1], q), arrived[:, -1:]  # h: (q, B, k), t: (B, 1)
            if need_compress:
                d_compress = weight_grad(hs, us)  # (q k, m_in)
            if need_x or need_norm:
                du = join(transposed_times(hs, compress, add_to=dus))  # + C^T h
                dx, d_norm = _norm_grads(du, x, xr, norm, r, t, ranks)
        return dx, d_norm, d_local, d_compress, d_decompress, None, None, None


class _GatherNormed(Function):
    """As r has arrived together with the features, it is applied to them at once. Kept: x, r and the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Tensor, eps: float, ranks: Ranks, dtype: torch.dtype) -> Tensor:
        width = x.shape[1]
        pending = start_all_gather(_with_squares((x * norm).to(dtype), x), ranks)  # (B, m) and squares
        gathered, squares = _without_squares(finish_all_gather(pending, ranks), width)  # (R, B, m), (B, 1)
        r = (squares / (width * ranks.size) + eps).rsqrt()
        y = (join(gathered) * r).to(dtype)  # (B, R m)
        ctx.save_for_backward(x, norm, r, y)
        ctx.ranks = ranks
        return y

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        x, norm, r, y = ctx.saved_tensors
        ranks = ctx.ranks
        _refuse_second_derivative("gather_normed")
        slices = _with_part(cut(d, ranks.size), d, y)  # (R, B, m + 1)
        arrived = finish_reduce_scatter(start_reduce_scatter(slices, ranks), ranks)
        return *_norm_grads(arrived[:, :-1], x, x * r, norm, r, arrived[:, -1:], ranks), None, None, None


def _with_squares(sent: Tensor, x: Tensor) -> Tensor:
    """sent (B, c) with the squares of this rank's x (B, m) in further columns, as many as their bits fill."""
    squares = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=_precise(x)).square()
    return torch.cat([sent, squares.view(sent.dtype)], 1)


def _without_squares(gathered: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """What all ranks sent, (R, B, columns + ...), and the squares summed over them, (B, 1)."""
    squares = gathered[:, :, columns:].contiguous()
    precise = torch.float64 if squares.shape[2] * squares.element_size() == 8 else torch.float32
    return gathered[:, :, :columns], squares.view(precise).sum(0)


def _with_part(slices: Tensor, d: Tensor, y: Tensor) -> Tensor:
    """slices (R, B, c) with this rank's part of t for every rank in a last column."""
    t = (d * y).sum(1, keepdim=True, dtype=_precise(d)).to(slices.dtype)  # (B, 1)
    return torch.cat([slices, t.expand(slices.shape[0], *t.shape)], 2)


def _norm_grads(
    du: Tensor, x: Tensor, xr: Tensor, norm: Tensor, r: Tensor, t: Tensor, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """dx and dw, from du without its factor r."""
    share = t / -(xr.shape[1] * ranks.size)  # (B, 1)
    dx = torch.addcmul(du * norm, xr, share.to(xr.dtype)) * r
    return dx.to(x.dtype), (du * xr).sum(0).to(norm.dtype)


def _precise(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _refuse_second_derivative(name: str) -> None:
    if records_graph():
        raise RuntimeError(f"{name} cannot be differentiated twice: what it kept has no history")
