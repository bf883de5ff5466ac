"""The equations of `ops.phantom` on more ranks than blocks: tensor parallelism inside a block, ghosts between blocks.

Rank (i, s) has place s among the t ranks of block i. Every weight of the block is sharded by rows over them, the ghosts
included, so that this rank holds m_in / t input features, m_out / t output features and k / t ghosts:

    x_i         all features of the block          all-gather, intra-block
    g_i[s]      = C_i[s] x_i                       this rank's ghosts
    g_j         ghosts of all blocks               all-gather, inter-block, then intra-block
    z_i[s]      = L_i[s] x_i + sum_{j != i} D_ij[s] g_j + b_i[s]

    h_j[s]      = sum_i D_ij^T d_i, part s         with d = dLoss/dz; reduce-scatter, intra-block, then inter-block
    dx_i[s]     = L_i^T d_i + C_i^T h_i, part s    summed over the ranks of the block: reduce-scatter, intra-block
    dL_i[s]     = d_i[s]^T x_i     dC_i[s] = h_i[s]^T x_i     dD_ij[s] = d_i[s]^T g_j     db_i[s] = sum d_i[s]

The function is that of fewer ranks. With a norm, the squares of x are piggybacked on the features intra-block, and
their sum on the ghosts inter-block; backward t on h inter-block, and its sum on dx intra-block.

    local       (m_out / t, m_in)       L_i[s]
    compress    (k / t, m_in)           C_i[s]
    decompress  (m_out / t, (p-1) k)    D_i,i+1[s] | D_i,i+2[s] | ... | D_i,i+p-1[s]
    bias        (m_out / t)             b_i[s]
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from phantom_parallel.ops.blocks import add_product, merge_blocks, split_blocks
from phantom_parallel.ops.collectives import Pending, RankGroup, finish, start_all_gather, start_reduce_scatter
from phantom_parallel.ops.phantom import Spec
from phantom_parallel.ops.rms import inverse_rms, norm_grads, partial_t, scale_rows, squares_of


def begin(
    x: Tensor, norm: Tensor | None, local: Tensor, compress: Tensor, spec: Spec
) -> tuple[Pending, Tensor, Tensor]:
    """Gather x (B, m_in / t) of the block, send C x, and compute L x (B, m_out / t). Also returns x_i (B, m_in), or
    with a norm w x of the whole block.
    """
    group = spec.group
    u = x if norm is None else (x * norm).to(local.dtype)  # u_i[s]: (B, m_in / t)
    pending = start_all_gather(u, group.intra_block, None if norm is None else squares_of(x))  # in flight
    width, own = u.shape[1], group.intra_block.rank * u.shape[1]
    z = torch.mm(u, local.narrow(1, own, width).t())  # L's product of this rank's own: (B, m_out / t), overlapped
    gathered, squares = finish(pending)  # (t, B, m_in / t), (t, B, 1)
    us = merge_blocks(gathered)  # u_i: (B, m_in)
    if group.wire != "full":
        us.narrow(1, own, width).copy_(u)  # the product used it as it is
    squares = None if norm is None else squares.sum(0)  # (B, 1)
    pending = start_all_gather(torch.mm(us, compress.t()), group.inter_block, squares)  # g_i[s]: (B, k / t), in flight
    for start, length in ((0, own), (own + width, us.shape[1] - own - width)):  # of the block's other ranks
        z = add_product(z, us.narrow(1, start, length), local.narrow(1, start, length).t())  # L u, overlapped
    return pending, z, us


def end(
    pending: Pending, z: Tensor, decompress: Tensor, features: int, spec: Spec
) -> tuple[Tensor, Tensor, Tensor | None]:
    """L x + D g (B, m_out / t); with the norm's eps, times r (B, 1). Returns it, the ghosts of all other blocks in ring
    order (B, (p-1) k), and r.
    """
    arrived, squares = finish(pending)  # g_j[s]: (p, B, k / t), (p, B, 1)
    pending = start_all_gather(arrived.reshape(-1, arrived.shape[2]), spec.group.intra_block)  # in flight
    r = None if spec.eps is None else inverse_rms(squares, features, spec.eps)  # (B, 1)
    gathered = finish(pending).values  # g_j: (t, p B, k / t)
    ghosts = _others_in_ring(gathered, spec.group)  # (B, (p-1) k)
    return add_ghosts(z, ghosts, decompress, r, spec), ghosts, r


def add_ghosts(z: Tensor, ghosts: Tensor, decompress: Tensor, r: Tensor | None, spec: Spec) -> Tensor:
    """r (L x + D g): (B, m_out / t)."""
    z = add_product(z, ghosts, decompress.t())
    return z if r is None else scale_rows(z, r)


def local_product(x: Tensor, norm: Tensor, us: Tensor, local: Tensor, spec: Spec) -> Tensor:
    """L w x (B, m_out / t) from what is saved for backward."""
    return torch.mm(us, local.t())


def end_backward(
    d: Tensor, decompress: Tensor, ghosts: Tensor, r: Tensor | None, y: Tensor | None, spec: Spec,
    *, need_h: bool, need_decompress: bool,
) -> tuple[Pending | None, Tensor | None]:  # fmt: skip
    """Send h of d (B, m_out / t), and compute dD. With a norm, from its r and the result y (B, m_out / t)."""
    pending = d_decompress = None
    group = spec.group
    if need_h:
        h = _by_source(torch.mm(d, decompress), group)  # this rank's part of h: (t, p, B, k / t)
        pending = start_reduce_scatter(h.flatten(1, 2), group.intra_block)  # in flight
    if need_decompress:
        scaled = ghosts if r is None else (ghosts * r).to(d.dtype)  # so that d needs no r
        d_decompress = torch.mm(d.t(), scaled)  # d^T g: (m_out / t, (p-1) k), overlapped
    if pending is not None:
        total = finish(pending).values.view(h.shape[1:])  # by block: (p, B, k / t)
        pending = start_reduce_scatter(total, group.inter_block, None if y is None else partial_t(d, y))  # in flight
    return pending, d_decompress


def begin_backward(
    pending: Pending | None, d: Tensor, r: Tensor | None, x: Tensor, us: Tensor, norm: Tensor | None, local: Tensor,
    compress: Tensor, spec: Spec, needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """dx, dw, dL and dC of d (B, m_out / t), once h has arrived."""
    dx = d_norm = d_local = d_compress = None
    need_x, need_norm, need_local, need_compress = needs
    group, need_dx = spec.group, need_x or need_norm
    if need_dx:
        dus = _slices_by_place(d, local, group)  # L^T d: (t, B, m_in / t), overlapped
    if r is not None:
        us = (us * r).to(d.dtype)  # so that d needs no r
    if need_local and not need_dx:
        d_local = torch.mm(d.t(), us)  # overlapped with h: there is no dx
    if pending is not None:
        h, t = finish(pending)  # h_i[s]: (B, k / t); t of this place: (B, 1)
    if need_dx:
        dus = _slices_by_place(h, compress, group, add_to=dus)  # + C^T h
        pending = start_reduce_scatter(dus, group.intra_block, t)  # in flight
        if need_local:
            d_local = torch.mm(d.t(), us)  # d^T u: (m_out / t, m_in), overlapped
    if need_compress:
        d_compress = torch.mm(h.t(), us)  # h^T u: (k / t, m_in), overlapped
    if need_dx:
        assert pending is not None
        dx, t = finish(pending)  # (B, m_in / t), (B, 1)
        if norm is not None and r is not None:
            dx, d_norm = norm_grads(dx, x, x * r, norm, r, t, group)
    return dx, d_norm, d_local, d_compress


def _slices_by_place(d: Tensor, weight: Tensor, group: RankGroup, add_to: Tensor | None = None) -> Tensor:
    """W^T d by the place of the features, as the exchange needs them: (B, b) with W (b, m_in) -> (t, B, m_in / t)."""
    t = group.intra_block.size
    slices, ds = split_blocks(weight, t), d.expand(t, *d.shape)  # (t, b, m_in / t), (t, B, b)
    return torch.bmm(ds, slices) if add_to is None else add_product(add_to, ds, slices)


def _others_in_ring(gathered: Tensor, group: RankGroup) -> Tensor:
    """Ghosts of all other blocks in ring order, from all by place and block: (t, p B, k / t) -> (B, (p-1) k)."""
    p, t = group.inter_block.size, group.intra_block.size
    by_place = gathered.view(t, p, gathered.shape[1] // p, gathered.shape[2])  # (t, p, B, k / t)
    ring = torch.roll(by_place.permute(2, 1, 0, 3), -(group.inter_block.rank + 1), 1)  # (B, p, t, k / t): own last
    return ring[:, : p - 1].flatten(1)


def _by_source(h: Tensor, group: RankGroup) -> Tensor:
    """The conjugate of `_others_in_ring`: (B, (p-1) k) -> (t, p, B, k / t), with zeros for the own block."""
    p, t = group.inter_block.size, group.intra_block.size
    slices = h.reshape(h.shape[0], p - 1, t, h.shape[1] // ((p - 1) * t)).permute(2, 1, 0, 3)  # (t, p-1, B, k / t)
    return torch.roll(F.pad(slices, (0, 0, 0, 0, 0, 1)), group.inter_block.rank + 1, 1)
