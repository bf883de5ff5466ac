"""Into and out of the region where features are cut over ranks.

`shard_features` and `gather_features` are each other's inverse; the gradient of one runs through the other.
"""

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from phantom_parallel.ops.blocks import apply, cut, join
from phantom_parallel.ops.collectives import (
    Ranks,
    finish_all_gather,
    finish_reduce_scatter,
    ranks_of,
    start_all_gather,
    start_reduce_scatter,
)


def take_features(x: Tensor, ranks: Ranks) -> Tensor:
    """This rank's share of the last dimension."""
    width = x.shape[-1] // ranks.size
    return x[..., ranks.rank * width : (ranks.rank + 1) * width]


def all_gather_features(x: Tensor, ranks: Ranks) -> Tensor:
    """(..., m) on every rank -> (..., R m)."""
    gathered = finish_all_gather(start_all_gather(x.reshape(-1, x.shape[-1]), ranks), ranks)
    return join(gathered).view(*x.shape[:-1], ranks.size * x.shape[-1])


def reduce_scatter_features(x: Tensor, ranks: Ranks) -> Tensor:
    """(..., R m) on every rank -> (..., m), this rank's share of the sum."""
    slices = cut(x.reshape(-1, x.shape[-1]), ranks.size)
    own = finish_reduce_scatter(start_reduce_scatter(slices, ranks), ranks)
    return own.view(*x.shape[:-1], x.shape[-1] // ranks.size)


class _Shard(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return take_features(x, ranks).contiguous()

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return all_gather_features(d, ctx.ranks), None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, partial_grad: bool) -> Tensor:
        ctx.ranks, ctx.partial_grad = ranks, partial_grad
        return all_gather_features(x, ranks)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:
        back = reduce_scatter_features if ctx.partial_grad else take_features
        return back(d, ctx.ranks), None, None


def shard_features(x: Tensor, mesh: DeviceMesh | Ranks | None) -> Tensor:
    """Forward: keep this rank's features of a replicated x; backward: all-gather. Each rank then has the whole gradient
    of x.
    """
    ranks = ranks_of(mesh)
    if x.shape[-1] % ranks.size:
        raise ValueError(
            f"{ranks.size} ranks do not divide the {x.shape[-1]} features of an input of shape {tuple(x.shape)}"
        )
    return x if ranks.size == 1 else apply(_Shard, x, ranks)


def gather_features(x: Tensor, mesh: DeviceMesh | Ranks | None, *, partial_grad: bool = False) -> Tensor:
    """Forward: all-gather of features; backward: this rank's slice of the gradient.

    That is right where every rank does the same with the result, as with a loss computed on all of them. Where each
    rank does its own part (a vocabulary-parallel head), every rank's gradient is a part of the sum:
    ``partial_grad=True`` makes the backward a reduce-scatter.
    """
    ranks = ranks_of(mesh)
    return x if ranks.size == 1 else apply(_Gather, x, ranks, partial_grad)
