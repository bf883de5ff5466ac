"""RMSNorm on features that are sharded over ranks, without a collective of its own.

    r = 1 / sqrt(sum_j |x_j|^2 / n + eps)      one number per row, over the features of all blocks
    y = W (r w x) = r W (w x)                  with the norm's weight w, one number per feature

w x is local. r needs the sum of squares over all ranks, but as it is one number per row, it can be applied after the
matrix product: the squares are piggybacked on the product's own exchange, as one more ghost. Backward, with d =
dLoss/dy and u = w x,

    t   = sum d y                              over the features of all ranks: piggybacked on the reduce-scatter
    du  = W^T d                                the product's own backward, without r
    dw  = sum r x du                           over rows
    dx  = r (w du - r x t / n)

Both sums are exact columns of their exchange (`ops.collectives`): the squares are float32 or better, independent of the
dtype of the products and of the wire format, and t too except where it is summed with gradients of shorter words.
"""

import torch
from torch import Tensor

from phantom_parallel.ops.blocks import is_transformed
from phantom_parallel.ops.collectives import RankGroup
from phantom_parallel.ops.wire import precise


def squares_of(x: Tensor) -> Tensor:
    """This rank's part of the sum of squares of a row of x (B, m): (B, 1)."""
    return torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=precise(x.dtype)).square()


def inverse_rms(squares: Tensor, features: int, eps: float) -> Tensor:
    """r (B, 1) from the squares of all ranks (R, B, 1), over the ``features`` of all of them."""
    return (squares.sum(0) / features + eps).rsqrt()


def scale_rows(y: Tensor, r: Tensor) -> Tensor:
    """y (B, b) times r (B, 1), in place and in the dtype of y."""
    return (y * r).to(y.dtype) if is_transformed() else y.mul_(r)


def partial_t(d: Tensor, y: Tensor) -> Tensor:
    """This rank's part of t, the sum of d y: (B, 1)."""
    return (d * y).sum(1, keepdim=True, dtype=precise(d.dtype))


def norm_grads(
    du: Tensor, x: Tensor, xr: Tensor, norm: Tensor, r: Tensor, t: Tensor, group: RankGroup
) -> tuple[Tensor, Tensor]:
    """dx and dw, from du without its factor r."""
    share = t / -(xr.shape[1] * group.size)  # (B, 1)
    dx = torch.addcmul(du * norm, xr, share.to(xr.dtype)) * r
    return dx.to(x.dtype), (du * xr).sum(0).to(norm.dtype)
