"""The phantom maps in two parts, a begin and an end, with time for the products of other rows between them.

    begin   g = C x, sent      z = L x          backward: dL, L^T d; with the h that has arrived, dC and + C^T h
    end     z + D g            g of all ranks   backward: h = D^T d, sent; dD

The equations are those of `ops.phantom`, `ops.normed` and, for a head by rows, `ops.head`, and so are the results. A
batch in two halves begins one, then the other, ends the first, and so on: while the ghosts of one half travel, the
other half computes. Autograd runs backward in the opposite order, end before begin, so that the halves alternate there
too. `Begun` holds what the two parts of a map share; the token that autograd sees has no values, and makes it run one
backward after the other.
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
    matmul_blocks,
    matmul_blocks_t,
    merge_blocks,
    merge_result,
    split_blocks,
    weight_grad,
)
from phantom_parallel.ops.collectives import (
    Pending,
    RankGroup,
    finish_all_gather,
    finish_exchange,
    finish_reduce_scatter,
    start_all_gather,
    start_exchange,
    start_reduce_scatter,
)
from phantom_parallel.ops.head import finish_row_gradients, normed_features, start_row_gradients
from phantom_parallel.ops.phantom import ghosts_of_others, sum_by_source
from phantom_parallel.ops.rms import norm_grads, partial_t, squares_of


class Begun:
    """A map that has begun: its message in flight, what is computed so far, and the token of its begin."""

    token: Tensor
    pending: Pending | None = None
    partial: Tensor | None = None  # L x forward, d backward
    scale: Tensor | None = None  # of the norm, backward: r

    def __init__(self, x: Tensor, group: RankGroup) -> None:
        self.shape, self.features = x.shape[:-1], x.shape[-1] * group.size  # of the whole input

    def take(self) -> tuple[Any, Any, Any]:
        """The message, the partial result and the scale, which are not kept longer than needed."""
        taken = self.pending, self.partial, self.scale
        self.pending = self.partial = self.scale = None
        return taken


def begin_phantom(
    x: Tensor, norm: Tensor | None, local: Tensor, compress: Tensor, *, blocks: int, group: RankGroup
) -> Begun:
    """Start `phantom_linear`, or with a norm `normed_phantom_linear`, of x (..., q m_in)."""
    check_operands(x, local)
    x = x if norm is not None else cast_for_autocast(x)[0]
    local, compress = cast_for_autocast(local, compress)
    begun = Begun(x, group)
    begun.token = apply_function(
        _Begin, x.reshape(-1, x.shape[-1]), norm, local, compress, blocks // group.size, group, begun
    )
    return begun


def end_phantom(
    begun: Begun, decompress: Tensor, bias: Tensor | None = None, *, eps: float | None, blocks: int, group: RankGroup
) -> Tensor:
    """The result of a map that has begun, (..., q m_out). ``eps`` is the norm's, if it has one."""
    decompress, bias = cast_for_autocast(decompress, bias)
    z: Tensor = apply_function(_End, begun.token, decompress, bias, eps, blocks, group, begun)
    return z.view(*begun.shape, z.shape[-1])


class _Begin(Function):
    """Saved: x and the weights."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm: Tensor | None,
        local: Tensor,
        compress: Tensor,
        q: int,
        group: RankGroup,
        begun: Begun,
    ) -> Tensor:
        us = split_blocks(x if norm is None else (x * norm).to(local.dtype), q)  # w x: (q, B, m_in)
        squares = None if norm is None else squares_of(x)  # (B, 1)
        begun.pending = start_all_gather(merge_blocks(matmul_blocks(us, compress)), group, squares)  # g: (B, q k)
        begun.partial = matmul_blocks(us, local)  # L u: (q, B, m_out)
        ctx.save_for_backward(x, norm, local, compress)
        ctx.q, ctx.group, ctx.begun = q, group, begun
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        x, norm, local, compress = ctx.saved_tensors
        q, group = ctx.q, ctx.group
        pending, d, r = ctx.begun.take()
        need_x, need_norm, need_local, need_compress = ctx.needs_input_grad[:4]
        dx: Tensor | None
        dx = d_norm = d_local = d_compress = None
        ds = split_blocks(d, q)  # (q, B, m_out)
        xr = x if norm is None else x * r
        us = split_blocks(x if norm is None else (xr * norm).to(local.dtype), q)  # r w x: (q, B, m_in)
        if need_local:
            d_local = weight_grad(ds, us)  # (q m_out, m_in)
        dus = matmul_blocks_t(ds, local) if need_x or need_norm else None  # L^T d: (q, B, m_in)
        own, t = finish_reduce_scatter(pending, group)  # (B, q k), (B, 1)
        hs = split_blocks(own, q)  # h: (q, B, k)
        if need_compress:
            d_compress = weight_grad(hs, us)  # (q k, m_in)
        if dus is not None:
            dx = merge_blocks(matmul_blocks_t(hs, compress, add_to=dus))  # + C^T h
            if norm is not None:
                dx, d_norm = norm_grads(dx, x, xr, norm, r, t, group)
        return dx, d_norm, d_local, d_compress, None, None, None


class _End(Function):
    """Saved: the gathered ghosts, and with a norm r and the result."""

    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        decompress: Tensor,
        bias: Tensor | None,
        eps: float | None,
        blocks: int,
        group: RankGroup,
        begun: Begun,
    ) -> Tensor:
        pending, zs, _ = begun.take()
        gathered, squares = finish_all_gather(pending, group)  # (R, B, q k), (R, B, 1)
        zs = matmul_blocks(ghosts_of_others(gathered, blocks, group), decompress, add_to=zs)  # + D g
        z, r = merge_result(zs), None  # (B, q m_out)
        if eps is not None:
            r = (squares.sum(0) / begun.features + eps).rsqrt()  # (B, 1)
            z = z.mul_(r)
        ctx.save_for_backward(decompress, gathered, r, z if eps is not None else None)
        ctx.blocks, ctx.group, ctx.begun = blocks, group, begun
        return z if bias is None else z.add_(bias)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        decompress, gathered, r, y = ctx.saved_tensors
        blocks, group, begun = ctx.blocks, ctx.group, ctx.begun
        _refuse_second_derivative()
        need_token, need_decompress, need_bias = ctx.needs_input_grad[:3]
        ds = split_blocks(d, blocks // group.size)  # (q, B, m_out)
        if need_token:
            h = sum_by_source(matmul_blocks_t(ds, decompress), blocks, group)  # partial h: (R, B, q k)
            begun.pending = start_reduce_scatter(h, group, None if r is None else partial_t(d, y))  # in flight
            begun.partial, begun.scale = d, r
        d_decompress = None
        if need_decompress:
            ghosts = gathered if r is None else (gathered * r).to(d.dtype)
            d_decompress = weight_grad(ds, ghosts_of_others(ghosts, blocks, group))  # (q m_out, (p-1) k)
        d_bias = d.sum(0) if need_bias else None
        return d.new_empty(0), d_decompress, d_bias, None, None, None, None


def begin_rows(x: Tensor, norm: Tensor, *, group: RankGroup) -> Begun:
    """Start `row_logits` of x (..., m)."""
    dtype = cast_for_autocast(x)[0].dtype
    begun = Begun(x, group)
    begun.token = apply_function(_BeginRows, x.reshape(-1, x.shape[-1]), norm, group, dtype, begun)
    return begun


def end_rows(begun: Begun, weight: Tensor, *, eps: float, group: RankGroup) -> Tensor:
    """The logits (T / R, V) of a head that has begun, with the whole weight (V, n)."""
    (weight,) = cast_for_autocast(weight)
    logits: Tensor = apply_function(_EndRows, begun.token, weight, eps, group, begun)
    return logits


class _BeginRows(Function):
    """Saved: x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Tensor, group: RankGroup, dtype: torch.dtype, begun: Begun) -> Tensor:
        begun.pending = start_exchange((x * norm).to(dtype), group, squares_of(x))  # (T, m) and squares
        ctx.save_for_backward(x, norm)
        ctx.group, ctx.begun = group, begun
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        pending, _, _ = ctx.begun.take()
        x, norm = ctx.saved_tensors
        return *finish_row_gradients(pending, x, norm, ctx.group), None, None, None


class _EndRows(Function):
    """Saved: y, r and the weight."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, weight: Tensor, eps: float, group: RankGroup, begun: Begun) -> Tensor:
        pending, _, _ = begun.take()
        y, r = normed_features(finish_exchange(pending, group), eps)  # (T / R, n), (T / R, 1)
        ctx.save_for_backward(weight, y, r)
        ctx.group, ctx.begun = group, begun
        return torch.mm(y, weight.t())

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        weight, y, r = ctx.saved_tensors
        _refuse_second_derivative()
        if ctx.needs_input_grad[0]:
            ctx.begun.pending = start_row_gradients(d, weight, y, r, ctx.group)  # in flight
        d_weight = torch.mm(d.t(), y) if ctx.needs_input_grad[1] else None  # (V, n)
        return d.new_empty(0), d_weight, None, None, None


def _refuse_second_derivative() -> None:
    if is_creating_graph():
        raise RuntimeError("maps in two parts cannot be differentiated twice: do not interleave them")
