"""The low-rank map z = U V x + b, a baseline, with its exchange on the rank dimension (BOOST, arXiv 2512.12131; CoLA).

Features are sharded over R ranks; this rank holds m_in input and m_out output features, and with these ``down``
(m_in, k), its part of V transposed, and ``up`` (m_out, k), its rows of U.

    g  = V x               k values a row, summed over ranks: one all-reduce
    z  = U g + b
    h  = U^T d             with d = dLoss/dz; summed over ranks, one all-reduce
    dx = V^T h     dV = h^T x     dU = d^T g     db = sum d

With an RMSNorm before the map (`ops.rms`), w x takes the place of x and g is multiplied by r. Its squares are summed
together with g; of its backward, t = sum d z = sum h g needs no exchange, as every rank has h and g.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phantom_parallel.ops.blocks import apply_function, cast_for_autocast, check_operands
from phantom_parallel.ops.collectives import RankGroup
from phantom_parallel.ops.linear import Begun, refuse_second_derivative
from phantom_parallel.ops.rms import inverse_rms, norm_grads, partial_t, squares_of
from phantom_parallel.ops.tensor import start_sum
from phantom_parallel.ops.wire import precise


def begin_low_rank(x: Tensor, norm: Tensor | None, down: Tensor, *, group: RankGroup) -> Begun:
    """Start the map of this rank's features x (..., m_in), or of the normed x: g is in flight until the end."""
    check_operands(x, down)
    x = x if norm is not None else cast_for_autocast(x)[0]
    (down,) = cast_for_autocast(down)
    begun = Begun(x, group)
    begun.token = apply_function(_Begin, x.reshape(-1, x.shape[-1]), norm, down, group, begun)
    return begun


def end_low_rank(begun: Begun, up: Tensor, bias: Tensor | None, *, eps: float | None, group: RankGroup) -> Tensor:
    """The result of a map that has begun, (..., m_out). ``eps`` is the norm's, if it has one."""
    up, bias = cast_for_autocast(up, bias)
    z: Tensor = apply_function(_End, begun.token, up, bias, eps, group, begun)
    return z.view(*begun.shape, z.shape[-1])


class _Begin(Function):
    """Saved: x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Tensor | None, down: Tensor, group: RankGroup, begun: Begun) -> Tensor:
        u = x if norm is None else (x * norm).to(down.dtype)  # (B, m_in)
        begun.pending = start_sum(torch.mm(u, down), group, None if norm is None else squares_of(x))  # g, in flight
        ctx.save_for_backward(x, norm, down)
        ctx.group, ctx.begun = group, begun
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        x, norm, down = ctx.saved_tensors
        wait, g, r = ctx.begun.take()
        need_x, need_norm, need_down = ctx.needs_input_grad[:3]
        h = wait().values  # (B, k)
        xr = x if r is None else x * r  # so that h needs no r
        u = xr if norm is None else (xr * norm).to(h.dtype)
        d_down = torch.mm(u.t(), h) if need_down else None  # (m_in, k)
        dx = torch.mm(h, down.t()) if need_x or need_norm else None  # (B, m_in)
        d_norm = None
        if dx is not None and norm is not None:
            dx, d_norm = norm_grads(dx, x, xr, norm, r, partial_t(h, g), ctx.group)
        return dx, d_norm, d_down, None, None


class _End(Function):
    """Saved: g, and with a norm r."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, up: Tensor, bias: Tensor | None, eps: float | None, group: RankGroup, begun: Begun
    ) -> Tensor:
        g, squares = begun.take()[0]()  # (B, k), (B, 1)
        exact = precise(g.dtype)  # whatever the squares were summed in
        r = None if eps is None else inverse_rms(squares.unsqueeze(0).to(exact), begun.features, eps)  # (B, 1)
        g = g if r is None else (g * r).to(g.dtype)
        ctx.save_for_backward(up, g, r)
        ctx.group, ctx.begun = group, begun
        return F.linear(g, up, bias)  # (B, m_out)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        up, g, r = ctx.saved_tensors
        need_h, need_up, need_bias = ctx.needs_input_grad[:3]
        if need_h:
            ctx.begun.pending = start_sum(torch.mm(d, up), ctx.group)  # h, in flight
            ctx.begun.partial, ctx.begun.scale = g, r
        d_up = torch.mm(d.t(), g) if need_up else None  # (m_out, k), overlapped
        return d.new_empty(0), d_up, d.sum(0) if need_bias else None, None, None, None
