"""RMSNorm, then the phantom map on more ranks than blocks: `ops.normed` with the exchanges of `ops.two_level`.

The squares of x ride along with the features inside the block, and their sum with the ghosts across blocks. Backward t,
the sum of d y, rides along with h across blocks, and its sum with dx inside. No exchange is the norm's own.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phantom_parallel.ops.blocks import add_product, is_creating_graph, merge_blocks, recorded_grads
from phantom_parallel.ops.collectives import (
    check_output_grad,
    finish_all_gather,
    finish_reduce_scatter,
    start_all_gather,
    start_reduce_scatter,
)
from phantom_parallel.ops.levels import (
    TwoLevelGroup,
    finish_inside,
    finish_sum_inside,
    start_inside,
    start_sum_inside,
)
from phantom_parallel.ops.rms import inverse_rms, norm_grads, partial_t, squares_of
from phantom_parallel.ops.two_level import (
    add_other_products,
    by_source,
    composed_linear,
    others_in_ring,
    own_product,
    slices_by_place,
    with_own,
)


class TwoLevelNormedLinear(Function):
    """Exchanges are overlapped as in `TwoLevelLinear`. Saved: x, w x of the whole block, all ghosts, r and y."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm: Tensor,
        local: Tensor,
        compress: Tensor,
        decompress: Tensor,
        eps: float,
        group: TwoLevelGroup,
    ) -> Tensor:
        across, inside = group.across, group.inside
        u = (x * norm).to(local.dtype)  # w x: (B, m_in / t)
        pending = start_all_gather(u, inside, squares_of(x))  # in flight
        y = own_product(u, local, group)  # overlapped
        gathered, squares = finish_all_gather(pending, inside)  # (t, B, m_in / t), (t, B, 1)
        us = with_own(merge_blocks(gathered), u, group)  # of the block: (B, m_in)
        pending = start_all_gather(torch.mm(us, compress.t()), across, squares.sum(0))  # g_i[s]: (B, k / t), in flight
        y = add_other_products(y, us, local, group)  # L u: (B, m_out / t), overlapped
        arrived, squares = finish_all_gather(pending, across)  # (p, B, k / t), (p, B, 1)
        pending = start_inside(arrived, group)  # in flight
        r = (squares.sum(0) / (x.shape[1] * group.size) + eps).rsqrt()  # (B, 1)
        ghosts = others_in_ring(finish_inside(pending, group), group)  # (B, (p-1) k)
        y = add_product(y, ghosts, decompress.t()).mul_(r)  # (B, m_out / t)
        ctx.save_for_backward(x, norm, local, compress, decompress, us, ghosts, r, y)
        ctx.eps, ctx.group = eps, group
        return y

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        x, norm, local, compress, decompress, us, ghosts, r, y = ctx.saved_tensors
        group: TwoLevelGroup = ctx.group
        across, inside = group.across, group.inside
        need_x, need_norm, need_local, need_compress, need_decompress = ctx.needs_input_grad[:5]
        check_output_grad(d, group.everyone)
        if is_creating_graph():  # the saved results have no graph: a second derivative goes through the composed form
            inputs = (x, norm, local, compress, decompress)
            return *recorded_grads(_composed, inputs, ctx.eps, group, d=d), None, None
        dx = d_norm = d_local = d_compress = d_decompress = None

        needs_dx = need_x or need_norm
        needs_h = needs_dx or need_compress
        if needs_h:
            pending = start_sum_inside(by_source(torch.mm(d, decompress), group), group)  # in flight
        if need_decompress:
            d_decompress = torch.mm(d.t(), (ghosts * r).to(d.dtype))  # (m_out / t, (p-1) k), overlapped
        if needs_h:
            pending = start_reduce_scatter(finish_sum_inside(pending, group), across, partial_t(d, y))  # in flight
        if needs_dx:
            dus = slices_by_place(d, local, group)  # L^T d: (t, B, m_in / t), overlapped
        if needs_h:
            h, t = finish_reduce_scatter(pending, across)  # h_i[s]: (B, k / t); t of this place: (B, 1)
        if needs_dx:
            dus = slices_by_place(h, compress, group, add_to=dus)  # + C^T h
            pending = start_reduce_scatter(dus, inside, t)  # in flight
        us = (us * r).to(d.dtype)  # so that d needs no r
        if need_local:
            d_local = torch.mm(d.t(), us)  # (m_out / t, m_in), overlapped
        if need_compress:
            d_compress = torch.mm(h.t(), us)  # (k / t, m_in), overlapped
        if needs_dx:
            du, t = finish_reduce_scatter(pending, inside)  # (B, m_in / t), (B, 1)
            dx, d_norm = norm_grads(du, x, x * r, norm, r, t, group)
        return dx, d_norm, d_local, d_compress, d_decompress, None, None


def _composed(
    x: Tensor,
    norm: Tensor,
    local: Tensor,
    compress: Tensor,
    decompress: Tensor,
    eps: float,
    group: TwoLevelGroup,
) -> Tensor:
    """The map from differentiable parts, for second derivatives."""
    y = composed_linear((x * norm).to(local.dtype), local, compress, decompress, None, group)
    return (y * inverse_rms(x, eps, group)).to(y.dtype)
