"""The phantom linear map: the method's equations, in order.

Features are split into p blocks; this rank holds q = p / R consecutive ones. B is the number of rows, k the number of
ghosts of a block, m_in and m_out the widths of a block.

    g_j  = C_j x_j                                 ghosts: what block j sends to the others
    z_i  = L_i x_i + b_i + sum_{j != i} D_ij g_j   output

    h_j  = sum_{i != j} D_ij^T d_i                 with d = dLoss/dz
    dx_j = L_j^T d_j + C_j^T h_j
    dL_i = d_i^T x_i     dC_j = h_j^T x_j     dD_ij = d_i^T g_j     db_i = sum d_i

The map is a `begin`, which sends the ghosts and computes L x while they are in flight, and an `end`, which adds D g.
Backward, `end_backward` sends h and computes dD, and `begin_backward` computes dL and L^T d until h has arrived. With a
norm (`ops.rms`), u = w x takes the place of x, the result is multiplied by r, and the norm's sums are piggybacked on
the two messages. `ops.linear` makes autograd functions of these four, and `ops.two_level` has the same four for several
ranks in each block.

Weights stack their blocks on dimension 0. Block i lists its sources in **ring order**, j = i+1, i+2, ..., i+p-1 (mod
p): its own block has no column, every block's row has the same layout, and the ghosts that consecutive blocks need are
overlapping windows of one matrix.

    local       (q m_out, m_in)       L_i
    compress    (q k, m_in)           C_j
    decompress  (q m_out, (p-1) k)    D_i,i+1 | D_i,i+2 | ... | D_i,i+p-1
    bias        (q m_out)             b_i
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phantom_parallel.ops.blocks import (
    is_transformed,
    matmul_blocks,
    matmul_blocks_t,
    merge_blocks,
    split_blocks,
    weight_grad,
)
from phantom_parallel.ops.collectives import Pending, RankGroup, finish, start_all_gather, start_reduce_scatter
from phantom_parallel.ops.rms import inverse_rms, norm_grads, partial_t, scale_rows, squares_of


class Spec(NamedTuple):
    """What a map is apart from its tensors."""

    blocks: int
    group: RankGroup
    eps: float | None = None  # of the norm; None without one


def begin(x: Tensor, norm: Tensor | None, local: Tensor, compress: Tensor, spec: Spec) -> tuple[Pending, Tensor, None]:
    """Send C x of x (B, q m_in), and compute L x (q, B, m_out). With a norm (q m_in), of w x."""
    us = _blocks_of(x if norm is None else (x * norm).to(local.dtype), spec)  # u: (q, B, m_in)
    ghosts = merge_blocks(matmul_blocks(us, compress))  # g = C u: (B, q k)
    pending = start_all_gather(ghosts, spec.group, None if norm is None else squares_of(x))  # in flight
    return pending, matmul_blocks(us, local), None  # L u: (q, B, m_out), overlapped


def end(
    pending: Pending, zs: Tensor, decompress: Tensor, features: int, spec: Spec
) -> tuple[Tensor, Tensor, Tensor | None]:
    """L x + D g (B, q m_out); with the norm's eps, times r (B, 1). Returns it, all ghosts (R, B, q k), and r."""
    gathered, squares = finish(pending)  # (R, B, q k), (R, B, 1)
    r = None if spec.eps is None else inverse_rms(squares, features, spec.eps)  # (B, 1)
    return add_ghosts(zs, gathered, decompress, r, spec), gathered, r


def add_ghosts(zs: Tensor, gathered: Tensor, decompress: Tensor, r: Tensor | None, spec: Spec) -> Tensor:
    """r (L x + D g): (B, q m_out)."""
    others = ghosts_of_others(gathered, spec.blocks, spec.group)  # (q, B, (p-1) k)
    z = merge_blocks(matmul_blocks(others, decompress, add_to=zs))  # + D g: (B, q m_out)
    return z if r is None else scale_rows(z, r)


def local_product(x: Tensor, norm: Tensor, held: None, local: Tensor, spec: Spec) -> Tensor:
    """L w x (q, B, m_out) from what is saved for backward."""
    return matmul_blocks(_blocks_of((x * norm).to(local.dtype), spec), local)


def end_backward(
    d: Tensor, decompress: Tensor, gathered: Tensor, r: Tensor | None, y: Tensor | None, spec: Spec,
    *, need_h: bool, need_decompress: bool,
) -> tuple[Pending | None, Tensor | None]:  # fmt: skip
    """Send h of d (B, q m_out), and compute dD. With a norm, from its r and the result y (B, q m_out)."""
    pending = d_decompress = None
    ds = _blocks_of(d, spec)  # (q, B, m_out)
    if need_h:
        h = sum_by_source(matmul_blocks_t(ds, decompress), spec.blocks, spec.group)  # partial h: (R, B, q k)
        pending = start_reduce_scatter(h, spec.group, None if y is None else partial_t(d, y))  # in flight
    if need_decompress:
        ghosts = gathered if r is None else (gathered * r).to(d.dtype)  # (R, B, q k), so that d needs no r
        others = ghosts_of_others(ghosts, spec.blocks, spec.group)
        d_decompress = weight_grad(ds, others)  # d^T g: (q m_out, (p-1) k), overlapped
    return pending, d_decompress


def begin_backward(
    pending: Pending | None, d: Tensor, r: Tensor | None, x: Tensor, held: None, norm: Tensor | None, local: Tensor,
    compress: Tensor, spec: Spec, needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """dx, dw, dL and dC of d (B, q m_out), once h has arrived."""
    dx = d_norm = d_local = d_compress = None
    need_x, need_norm, need_local, need_compress = needs
    ds = _blocks_of(d, spec)  # (q, B, m_out)
    if need_local or need_compress or norm is not None:
        xr = x if r is None else x * r  # (B, q m_in), so that d needs no r
        us = _blocks_of(xr if norm is None else (xr * norm).to(local.dtype), spec)  # (q, B, m_in)
    if need_local:
        d_local = weight_grad(ds, us)  # d^T u: (q m_out, m_in), overlapped
    if need_x or need_norm:
        dus = matmul_blocks_t(ds, local)  # L^T d: (q, B, m_in), overlapped
    if pending is not None:
        h, t = finish(pending)  # (B, q k), (B, 1)
        hs = _blocks_of(h, spec)  # h: (q, B, k)
        if need_compress:
            d_compress = weight_grad(hs, us)  # h^T u: (q k, m_in)
        if need_x or need_norm:
            dx = merge_blocks(matmul_blocks_t(hs, compress, add_to=dus))  # + C^T h: (B, q m_in)
            if norm is not None and r is not None:
                dx, d_norm = norm_grads(dx, x, xr, norm, r, t, spec.group)
    return dx, d_norm, d_local, d_compress


def _blocks_of(x: Tensor, spec: Spec) -> Tensor:
    """(B, q m) -> (q, B, m)."""
    return split_blocks(x, spec.blocks // spec.group.size)


def ghosts_of_others(gathered: Tensor, blocks: int, group: RankGroup) -> Tensor:
    """For each block of this rank, the ghosts of all other blocks in ring order: (R, B, q k) -> (q, B, (p-1) k).

    These are overlapping windows of one matrix: the ring of ghosts, starting at the block after this rank's first one.
    """
    q, ghosts = blocks // group.size, gathered.shape[2] * group.size // blocks
    ring = torch.roll(merge_blocks(gathered), -(group.rank * q + 1) * ghosts, 1)  # (B, p k)
    if q > 2:
        ring = torch.cat([ring, ring[:, : (q - 2) * ghosts]], 1)  # (B, (p+q-2) k): the last windows wrap around
    width = (blocks - 1) * ghosts
    if is_transformed():  # torch.func has no rule for the backward of unfold
        return torch.stack([ring[:, i * ghosts : i * ghosts + width] for i in range(q)])
    return ring[:, : (blocks + q - 2) * ghosts].unfold(1, width, ghosts).transpose(0, 1)


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
