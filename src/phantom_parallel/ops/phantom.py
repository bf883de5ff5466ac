"""The phantom linear map: the method's equations, in order.

Features are cut into p blocks; this rank holds q = p / R of them, one after the other. B is the number of rows, k the
ghosts of a block, m_in and m_out the widths of a block.

    g_j  = C_j x_j                                 ghosts: what block j shows the others
    z_i  = L_i x_i + b_i + sum_{j != i} D_ij g_j   output

    h_j  = sum_{i != j} D_ij^T d_i                 with d = dLoss/dz
    dx_j = L_j^T d_j + C_j^T h_j
    dL_i = d_i^T x_i     dC_j = h_j^T x_j     dD_ij = d_i^T g_j     db_i = sum d_i

Weights stack their blocks on dimension 0. Block i lists its sources in **ring order**, j = i+1, i+2, ..., i+p-1 (mod
p): its own block has no column, every block's row is laid out alike, and the ghosts that consecutive blocks need are
overlapping windows of one matrix.

    local       (q m_out, m_in)       L_i
    compress    (q k, m_in)           C_j
    decompress  (q m_out, (p-1) k)    D_i,i+1 | D_i,i+2 | ... | D_i,i+p-1
    bias        (q m_out)             b_i
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


def phantom_linear(
    x: Tensor,
    local: Tensor,
    compress: Tensor,
    decompress: Tensor,
    bias: Tensor | None = None,
    *,
    blocks: int,
    ranks: Ranks = ALONE,
) -> Tensor:
    """z = L x + D C x + b. Forward: all-gather of the ghosts; backward: reduce-scatter of their gradient.

    ``x`` is (..., q m_in), this rank's features; the result is (..., q m_out).
    """
    x, local, compress, decompress, bias = cast_for_autocast(x, local, compress, decompress, bias)
    z: Tensor = apply(_PhantomLinear, x.reshape(-1, x.shape[-1]), local, compress, decompress, bias, blocks, ranks)
    return z.view(*x.shape[:-1], z.shape[-1])


class _PhantomLinear(Function):
    """Forward overlaps the exchange with L x, backward with dL, dD, db and L^T d. Kept: x and the gathered ghosts."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        local: Tensor,
        compress: Tensor,
        decompress: Tensor,
        bias: Tensor | None,
        blocks: int,
        ranks: Ranks,
    ) -> Tensor:
        q = blocks // ranks.size
        xs = cut(x, q)  # (q, B, m_in)
        pending = start_all_gather(join(times(xs, compress)), ranks)  # g: (B, q k), on its way
        zs = times(xs, local)  # L x: (q, B, m_out), meanwhile
        gathered = finish_all_gather(pending, ranks)  # g of all: (R, B, q k)
        zs = times(others(gathered, blocks, ranks), decompress, add_to=zs)  # + D g
        z = join(zs)  # (B, q m_out)

        need_x, need_local, need_compress, need_decompress = ctx.needs_input_grad[:4]
        ctx.save_for_backward(
            x if need_local or need_compress else None,
            gathered if need_decompress else None,
            local if need_x else None,
            compress if need_x or need_compress else None,
            decompress if need_x or need_compress else None,
        )
        ctx.blocks, ctx.ranks = blocks, ranks
        return z if bias is None else z.add_(bias)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        x, gathered, local, compress, decompress = ctx.saved_tensors
        blocks, ranks = ctx.blocks, ctx.ranks
        need_x, need_local, need_compress, need_decompress, need_bias = ctx.needs_input_grad[:5]
        q = blocks // ranks.size
        dxs = d_local = d_compress = d_decompress = d_bias = None

        ds = cut(d, q)  # (q, B, m_out)
        xs: Any = None if x is None else cut(x, q)  # (q, B, m_in)
        if need_x or need_compress:
            h = to_sources(transposed_times(ds, decompress), blocks, ranks)  # this rank's part of h: (R, B, q k)
            pending = start_reduce_scatter(h, ranks)  # on its way
        if need_local:
            d_local = weight_grad(ds, xs)  # d^T x: (q m_out, m_in), meanwhile
        if need_decompress:
            if records_graph() and (need_x or need_compress):  # what was kept has no history: gather it again, with one
                if xs is None:
                    raise RuntimeError(
                        "a second derivative by x and decompress needs local or compress to require grad"
                    )
                gathered = finish_all_gather(start_all_gather(join(times(xs, compress)), ranks), ranks)
            d_decompress = weight_grad(ds, others(gathered, blocks, ranks))  # d^T g: (q m_out, (p-1) k)
        if need_bias:
            d_bias = d.sum(0)  # (q m_out)
        if need_x:
            dxs = transposed_times(ds, local)  # L^T d: (q, B, m_in)
        if need_x or need_compress:
            hs = cut(finish_reduce_scatter(pending, ranks), q)  # h: (q, B, k)
            if need_compress:
                d_compress = weight_grad(hs, xs)  # h^T x: (q k, m_in)
            if need_x:
                dxs = transposed_times(hs, compress, add_to=dxs)  # + C^T h
        return None if dxs is None else join(dxs), d_local, d_compress, d_decompress, d_bias, None, None


def others(gathered: Tensor, blocks: int, ranks: Ranks) -> Tensor:
    """For each block here, the ghosts of all others in ring order: (R, B, q k) -> (q, B, (p-1) k).

    These are overlapping windows of one matrix, the ring of ghosts from the right neighbour of this rank's first block.
    """
    q, ghosts = blocks // ranks.size, gathered.shape[2] * ranks.size // blocks
    ring = torch.roll(join(gathered), -(ranks.rank * q + 1) * ghosts, 1)  # (B, p k)
    if q > 2:
        ring = torch.cat([ring, ring[:, : (q - 2) * ghosts]], 1)  # (B, (p+q-2) k): the last windows go past the end
    return ring[:, : (blocks + q - 2) * ghosts].unfold(1, (blocks - 1) * ghosts, ghosts).transpose(0, 1)


def to_sources(h: Tensor, blocks: int, ranks: Ranks) -> Tensor:
    """The conjugate of ``others``: each block's (q, B, (p-1) k) summed by source, laid out by owner: (R, B, q k)."""
    q, rows, ghosts = h.shape[0], h.shape[1], h.shape[2] // (blocks - 1)
    ring = h.new_zeros(rows, (blocks + q - 1) * ghosts)
    for i in range(q):
        ring[:, i * ghosts : (i + blocks - 1) * ghosts] += h[i]
    ring[:, : (q - 1) * ghosts] += ring[:, blocks * ghosts :]  # what went past the end
    natural = torch.roll(ring[:, : blocks * ghosts], (ranks.rank * q + 1) * ghosts, 1)  # (B, p k)
    return cut(natural, ranks.size)
