"""The phantom linear map on more ranks than blocks: tensor parallelism inside a block, ghosts between blocks.

Rank (i, s) has place s among the t ranks of block i. Every weight of the block is sharded by rows over them, the ghosts
included, so that this rank holds m_in / t input features, m_out / t output features and k / t ghosts:

    x_i         all features of the block          all-gather inside
    g_i[s]      = C_i[s] x_i                       this rank's ghosts
    g_j         ghosts of all blocks               all-gather across, then inside
    z_i[s]      = L_i[s] x_i + sum_{j != i} D_ij[s] g_j + b_i[s]

    h_j[s]      = sum_i D_ij^T d_i, part s         with d = dLoss/dz; reduce-scatter inside, then across
    dx_i[s]     = L_i^T d_i + C_i^T h_i, part s    summed over the ranks of the block: reduce-scatter inside
    dL_i[s]     = d_i[s]^T x_i     dC_i[s] = h_i[s]^T x_i     dD_ij[s] = d_i[s]^T g_j     db_i[s] = sum d_i[s]

The function is that of `phantom_linear` on fewer ranks; `ops.levels` has the two levels.

    local       (m_out / t, m_in)       L_i[s]
    compress    (k / t, m_in)           C_i[s]
    decompress  (m_out / t, (p-1) k)    D_i,i+1[s] | D_i,i+2[s] | ... | D_i,i+p-1[s]
    bias        (m_out / t)             b_i[s]
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phantom_parallel.ops.blocks import add_product, is_creating_graph, merge_blocks, recorded_grads, split_blocks
from phantom_parallel.ops.collectives import (
    check_output_grad,
    finish_all_gather,
    finish_reduce_scatter,
    start_all_gather,
    start_reduce_scatter,
)
from phantom_parallel.ops.features import gather_features
from phantom_parallel.ops.levels import (
    TwoLevelGroup,
    finish_inside,
    finish_sum_inside,
    start_inside,
    start_sum_inside,
)


class TwoLevelLinear(Function):
    """Forward overlaps the exchange of features with L's product of this rank's own, and that of ghosts across blocks
    with the rest of L x; backward those of h with dD and L^T d, and that of dx with dL and dC. Saved: x_i and all g.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        local: Tensor,
        compress: Tensor,
        decompress: Tensor,
        bias: Tensor | None,
        group: TwoLevelGroup,
    ) -> Tensor:
        across, inside = group.across, group.inside
        pending = start_all_gather(x, inside)  # x_i[s]: (B, m_in / t), in flight
        z = own_product(x, local, group)  # overlapped
        xs = with_own(merge_blocks(finish_all_gather(pending, inside).values), x, group)  # x_i: (B, m_in)
        pending = start_all_gather(torch.mm(xs, compress.t()), across)  # g_i[s]: (B, k / t), in flight
        z = add_other_products(z, xs, local, group)  # L x: (B, m_out / t), overlapped
        pending = start_inside(finish_all_gather(pending, across).values, group)  # g_j[s]: (p, B, k / t), in flight
        ghosts = others_in_ring(finish_inside(pending, group), group)  # (B, (p-1) k)
        z = add_product(z, ghosts, decompress.t())  # + D g

        _, need_local, need_compress, need_decompress = ctx.needs_input_grad[:4]
        ctx.save_for_backward(
            xs if need_local or need_compress else None,
            ghosts if need_decompress else None,
            x if any(ctx.needs_input_grad) else None,
            local,
            compress,
            decompress,
            bias,
        )
        ctx.group = group
        return z if bias is None else z.add_(bias)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        xs, ghosts, x, local, compress, decompress, bias = ctx.saved_tensors
        group: TwoLevelGroup = ctx.group
        across, inside = group.across, group.inside
        need_x, need_local, need_compress, need_decompress, need_bias = ctx.needs_input_grad[:5]
        check_output_grad(d, group.everyone)
        if is_creating_graph():  # the saved results have no graph: a second derivative goes through the composed form
            return *recorded_grads(composed_linear, (x, local, compress, decompress, bias), group, d=d), None
        dx = d_local = d_compress = d_decompress = d_bias = None

        needs_h = need_x or need_compress
        if needs_h:
            h = by_source(torch.mm(d, decompress), group)  # this rank's part of h: (t, p, B, k / t)
            pending = start_sum_inside(h, group)  # in flight
        if need_decompress:
            d_decompress = torch.mm(d.t(), ghosts)  # d^T g: (m_out / t, (p-1) k), overlapped
        if needs_h:
            pending = start_reduce_scatter(finish_sum_inside(pending, group), across)  # (p, B, k / t), in flight
        if need_x:
            dxs = slices_by_place(d, local, group)  # L^T d: (t, B, m_in / t), overlapped
        elif need_local:
            d_local = torch.mm(d.t(), xs)  # overlapped
        if needs_h:
            h = finish_reduce_scatter(pending, across).values  # h_i[s]: (B, k / t)
        if need_x:
            pending = start_reduce_scatter(
                slices_by_place(h, compress, group, add_to=dxs), inside
            )  # + C^T h, in flight
        if need_local and need_x:
            d_local = torch.mm(d.t(), xs)  # d^T x: (m_out / t, m_in), overlapped
        if need_compress:
            d_compress = torch.mm(h.t(), xs)  # h^T x: (k / t, m_in), overlapped
        if need_bias:
            d_bias = d.sum(0)  # (m_out / t)
        if need_x:
            dx = finish_reduce_scatter(pending, inside).values  # (B, m_in / t)
        return dx, d_local, d_compress, d_decompress, d_bias, None


def own_product(x: Tensor, local: Tensor, group: TwoLevelGroup) -> Tensor:
    """The part of L_i[s] x_i that this rank's own features x (B, m_in / t) give: (B, m_out / t)."""
    width = x.shape[1]
    return torch.mm(x, local.narrow(1, group.inside.rank * width, width).t())


def with_own(xs: Tensor, x: Tensor, group: TwoLevelGroup) -> Tensor:
    """The features of the block xs (B, m_in), with this rank's own as its product used them, and not rounded."""
    if group.wire != "full":
        xs.narrow(1, group.inside.rank * x.shape[1], x.shape[1]).copy_(x)
    return xs


def add_other_products(z: Tensor, xs: Tensor, local: Tensor, group: TwoLevelGroup) -> Tensor:
    """z and the part of L_i[s] x_i that the features of the block's other ranks give, of xs (B, m_in)."""
    width = xs.shape[1] // group.inside.size
    first = group.inside.rank * width
    for start, length in ((0, first), (first + width, xs.shape[1] - first - width)):
        z = add_product(z, xs.narrow(1, start, length), local.narrow(1, start, length).t())
    return z


def slices_by_place(d: Tensor, weight: Tensor, group: TwoLevelGroup, add_to: Tensor | None = None) -> Tensor:
    """W^T d by the place of the features, as the exchange needs them: (B, b) with W (b, m_in) -> (t, B, m_in / t)."""
    t = group.inside.size
    slices = split_blocks(weight, t)  # (t, b, m_in / t)
    return (
        torch.bmm(d.expand(t, *d.shape), slices)
        if add_to is None
        else add_product(add_to, d.expand(t, *d.shape), slices)
    )


def others_in_ring(gathered: Tensor, group: TwoLevelGroup) -> Tensor:
    """Ghosts of all other blocks in ring order, from all by place and block: (t, p, B, k / t) -> (B, (p-1) k)."""
    p = group.across.size
    ring = torch.roll(gathered.permute(2, 1, 0, 3), -(group.across.rank + 1), 1)  # (B, p, t, k / t): own block last
    return ring[:, : p - 1].flatten(1)


def by_source(h: Tensor, group: TwoLevelGroup) -> Tensor:
    """The conjugate of `others_in_ring`: (B, (p-1) k) -> (t, p, B, k / t), with zeros for the own block."""
    p, t = group.across.size, group.inside.size
    slices = h.reshape(h.shape[0], p - 1, t, h.shape[1] // ((p - 1) * t)).permute(2, 1, 0, 3)  # (t, p-1, B, k / t)
    return torch.roll(F.pad(slices, (0, 0, 0, 0, 0, 1)), group.across.rank + 1, 1)


def composed_linear(
    x: Tensor, local: Tensor, compress: Tensor, decompress: Tensor, bias: Tensor | None, group: TwoLevelGroup
) -> Tensor:
    """The map from differentiable parts, for second derivatives."""
    xs = gather_features(x, group.inside, partial_grad=True)  # x_i: (B, m_in)
    ghosts = gather_features(F.linear(xs, compress), group.across, partial_grad=True)  # (B, p k / t)
    ghosts = gather_features(ghosts, group.inside, partial_grad=True)  # (B, t p k / t): by place and block
    p, t = group.across.size, group.inside.size
    by_place = ghosts.view(ghosts.shape[0], t, p, compress.shape[0]).permute(1, 2, 0, 3)  # (t, p, B, k / t)
    return F.linear(xs, local, bias) + F.linear(others_in_ring(by_place, group), decompress)
