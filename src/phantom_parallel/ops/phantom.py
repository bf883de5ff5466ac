"""The phantom linear map: the method's equations, in order.

Features are split into p blocks; this rank holds q = p / R consecutive ones. B is the number of rows, k the number of
ghosts of a block, m_in and m_out the widths of a block.

    g_j  = C_j x_j                                 ghosts: what block j sends to the others
    z_i  = L_i x_i + b_i + sum_{j != i} D_ij g_j   output

    h_j  = sum_{i != j} D_ij^T d_i                 with d = dLoss/dz
    dx_j = L_j^T d_j + C_j^T h_j
    dL_i = d_i^T x_i     dC_j = h_j^T x_j     dD_ij = d_i^T g_j     db_i = sum d_i

Weights stack their blocks on dimension 0. Block i lists its sources in **ring order**, j = i+1, i+2, ..., i+p-1 (mod
p): its own block has no column, every block's row has the same layout, and the ghosts that consecutive blocks need are
overlapping windows of one matrix.

    local       (q m_out, m_in)       L_i
    compress    (q k, m_in)           C_j
    decompress  (q m_out, (p-1) k)    D_i,i+1 | D_i,i+2 | ... | D_i,i+p-1
    bias        (q m_out)             b_i
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phantom_parallel.ops.blocks import (
    apply_function,
    cast_for_autocast,
    check_operands,
    check_same_dtype,
    is_creating_graph,
    is_transformed,
    matmul_blocks,
    matmul_blocks_t,
    merge_blocks,
    merge_result,
    split_blocks,
    unflatten_rows,
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
from phantom_parallel.ops.levels import Group, TwoLevelGroup
from phantom_parallel.ops.two_level import TwoLevelLinear


def phantom_linear(
    x: Tensor,
    local: Tensor,
    compress: Tensor,
    decompress: Tensor,
    bias: Tensor | None = None,
    *,
    blocks: int,
    group: Group = SINGLE_RANK,
) -> Tensor:
    """z = L x + D C x + b. Forward: all-gather of the ghosts; backward: reduce-scatter of their gradient.

    ``x`` is (..., q m_in), this rank's features; the result is (..., q m_out). With a `TwoLevelGroup` several ranks
    share a block, as `ops.two_level` has it, and q = 1 / t. In one process ``torch.func`` transforms and forward-mode
    derivatives are supported.
    """
    check_operands(x, local)
    x, local, compress, decompress, bias = cast_for_autocast(x, local, compress, decompress, bias)
    check_same_dtype(x, local)
    rows = x.reshape(-1, x.shape[-1])
    if is_transformed() and group.size == 1:
        z = _composed(rows, local, compress, decompress, blocks)
        z = z if bias is None else z + bias
    elif isinstance(group, TwoLevelGroup):
        z = apply_function(TwoLevelLinear, rows, local, compress, decompress, bias, group)
    else:
        z = apply_function(_PhantomLinear, rows, local, compress, decompress, bias, blocks, group)
    return unflatten_rows(z, x)


def _composed(x: Tensor, local: Tensor, compress: Tensor, decompress: Tensor, blocks: int) -> Tensor:
    """The map without bias from differentiable functions of torch, in one process: (B, p m_in) -> (B, p m_out)."""
    k = compress.shape[0] // blocks
    xs = split_blocks(x, blocks)  # (p, B, m_in)
    ghosts = merge_blocks(matmul_blocks(xs, compress))  # g: (B, p k)
    first = torch.arange(1, blocks + 1, device=x.device).unsqueeze(1) * k  # (p, 1): of the block after each
    ring = (first + torch.arange((blocks - 1) * k, device=x.device)) % (blocks * k)  # (p, (p-1) k)
    zs = matmul_blocks(xs, local) + matmul_blocks(ghosts[:, ring].transpose(0, 1), decompress)  # (p, B, m_out)
    return merge_blocks(zs)


class _PhantomLinear(Function):
    """Forward overlaps the exchange with L x, backward with dL, dD, db and L^T d. Saved: x and the gathered ghosts."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        local: Tensor,
        compress: Tensor,
        decompress: Tensor,
        bias: Tensor | None,
        blocks: int,
        group: RankGroup,
    ) -> Tensor:
        q = blocks // group.size
        xs = split_blocks(x, q)  # (q, B, m_in)
        pending = start_all_gather(merge_blocks(matmul_blocks(xs, compress)), group)  # g: (B, q k), in flight
        zs = matmul_blocks(xs, local)  # L x: (q, B, m_out), overlapped
        gathered = finish_all_gather(pending, group).values  # g of all: (R, B, q k)
        zs = matmul_blocks(ghosts_of_others(gathered, blocks, group), decompress, add_to=zs)  # + D g
        z = merge_result(zs)  # (B, q m_out)

        need_x, need_local, need_compress, need_decompress = ctx.needs_input_grad[:4]
        ctx.save_for_backward(
            x if need_local or need_compress else None,
            gathered if need_decompress else None,
            local if need_x else None,
            compress if need_x or need_compress else None,
            decompress if need_x or need_compress else None,
        )
        ctx.blocks, ctx.group = blocks, group
        return z if bias is None else z.add_(bias)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        x, gathered, local, compress, decompress = ctx.saved_tensors
        blocks, group = ctx.blocks, ctx.group
        check_output_grad(d, group)
        need_x, need_local, need_compress, need_decompress, need_bias = ctx.needs_input_grad[:5]
        q = blocks // group.size
        dxs = d_local = d_compress = d_decompress = d_bias = None

        ds = split_blocks(d, q)  # (q, B, m_out)
        xs: Any = None if x is None else split_blocks(x, q)  # (q, B, m_in)
        if need_x or need_compress:
            h = sum_by_source(matmul_blocks_t(ds, decompress), blocks, group)  # partial h: (R, B, q k)
            pending = start_reduce_scatter(h, group)  # in flight
        if need_local:
            d_local = weight_grad(ds, xs)  # d^T x: (q m_out, m_in), overlapped
        if need_decompress:
            if is_creating_graph() and (need_x or need_compress):  # the saved ghosts have no graph: gather them again
                if xs is None:
                    raise RuntimeError(
                        "a second derivative by x and decompress needs local or compress to require grad"
                    )
                again = start_all_gather(merge_blocks(matmul_blocks(xs, compress)), group)
                gathered = finish_all_gather(again, group).values
            d_decompress = weight_grad(ds, ghosts_of_others(gathered, blocks, group))  # d^T g: (q m_out, (p-1) k)
        if need_bias:
            d_bias = d.sum(0)  # (q m_out)
        if need_x:
            dxs = matmul_blocks_t(ds, local)  # L^T d: (q, B, m_in)
        if need_x or need_compress:
            hs = split_blocks(finish_reduce_scatter(pending, group).values, q)  # h: (q, B, k)
            if need_compress:
                d_compress = weight_grad(hs, xs)  # h^T x: (q k, m_in)
            if need_x:
                dxs = matmul_blocks_t(hs, compress, add_to=dxs)  # + C^T h
        return None if dxs is None else merge_blocks(dxs), d_local, d_compress, d_decompress, d_bias, None, None


def ghosts_of_others(gathered: Tensor, blocks: int, group: RankGroup) -> Tensor:
    """For each block of this rank, the ghosts of all other blocks in ring order: (R, B, q k) -> (q, B, (p-1) k).

    These are overlapping windows of one matrix: the ring of ghosts, starting at the block after this rank's first one.
    """
    q, ghosts = blocks // group.size, gathered.shape[2] * group.size // blocks
    ring = torch.roll(merge_blocks(gathered), -(group.rank * q + 1) * ghosts, 1)  # (B, p k)
    if q > 2:
        ring = torch.cat([ring, ring[:, : (q - 2) * ghosts]], 1)  # (B, (p+q-2) k): the last windows wrap around
    return ring[:, : (blocks + q - 2) * ghosts].unfold(1, (blocks - 1) * ghosts, ghosts).transpose(0, 1)


def sum_by_source(h: Tensor, blocks: int, group: RankGroup) -> Tensor:
    """The conjugate of ``ghosts_of_others``: (q, B, (p-1) k) by receiver, summed by source, to (R, B, q k) by owner."""
    q, rows, ghosts = h.shape[0], h.shape[1], h.shape[2] // (blocks - 1)
    if torch.compiler.is_compiling():  # updates of slices of slices take Inductor minutes
        ring = torch.stack([F.pad(h[i], (i * ghosts, (q - i) * ghosts)) for i in range(q)]).sum(0)
    else:
        ring = h.new_zeros(rows, (blocks + q - 1) * ghosts)
        for i in range(q):
            ring[:, i * ghosts : (i + blocks - 1) * ghosts] += h[i]
    ring[:, : (q - 1) * ghosts] += ring[:, blocks * ghosts :]  # the part that wrapped around
    natural = torch.roll(ring[:, : blocks * ghosts], (group.rank * q + 1) * ghosts, 1)  # (B, p k)
    return split_blocks(natural, group.size)
