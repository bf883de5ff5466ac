"""Parts of RMSNorm on features that are sharded over ranks: the sums that ride along with other exchanges."""

import torch
from torch import Tensor

from phantom_parallel.ops.features import gather_features
from phantom_parallel.ops.levels import Group


def squares_of(x: Tensor) -> Tensor:
    """This rank's part of the sum of squares of a row of x (B, m): (B, 1)."""
    return torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=precise(x)).square()


def partial_t(d: Tensor, y: Tensor) -> Tensor:
    """This rank's part of t, the sum of d y: (B, 1)."""
    return (d * y).sum(1, keepdim=True, dtype=precise(d))


def norm_grads(
    du: Tensor, x: Tensor, xr: Tensor, norm: Tensor, r: Tensor, t: Tensor, group: Group
) -> tuple[Tensor, Tensor]:
    """dx and dw, from du without its factor r."""
    share = t / -(xr.shape[1] * group.size)  # (B, 1)
    dx = torch.addcmul(du * norm, xr, share.to(xr.dtype)) * r
    return dx.to(x.dtype), (du * xr).sum(0).to(norm.dtype)


def precise(x: Tensor) -> torch.dtype:
    """The dtype of sums over features: float32 or better."""
    return torch.promote_types(x.dtype, torch.float32)


def inverse_rms(x: Tensor, eps: float, group: Group) -> Tensor:
    """r of each row of this rank's features (B, m), with an exchange of its own: (B, 1)."""
    squares = x.to(precise(x)).square().sum(1, keepdim=True)  # (B, 1)
    total = gather_features(squares, group, partial_grad=True).sum(1, keepdim=True)
    return (total / (x.shape[1] * group.size) + eps).rsqrt()
