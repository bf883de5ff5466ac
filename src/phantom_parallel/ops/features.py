"""Entry to and exit from the region where features are sharded over ranks.

`shard_features` and `gather_features` are each other's inverse; the backward of one is the forward of the other.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from phantom_parallel.ops.blocks import apply_function, merge_blocks, split_blocks
from phantom_parallel.ops.collectives import RankGroup, all_gather, rank_group, reduce_scatter


def take_features(x: Tensor, group: RankGroup) -> Tensor:
    """This rank's slice of the last dimension."""
    width = x.shape[-1] // group.size
    return x[..., group.rank * width : (group.rank + 1) * width]


def all_gather_features(x: Tensor, group: RankGroup) -> Tensor:
    """(..., m) on every rank -> (..., R m)."""
    gathered = all_gather(x.reshape(-1, x.shape[-1]), group).values
    return merge_blocks(gathered).view(*x.shape[:-1], group.size * x.shape[-1])


def reduce_scatter_features(x: Tensor, group: RankGroup) -> Tensor:
    """(..., R m) on every rank -> (..., m), this rank's slice of the sum."""
    slices = split_blocks(x.reshape(-1, x.shape[-1]), group.size)
    own = reduce_scatter(slices, group).values
    return own.view(*x.shape[:-1], x.shape[-1] // group.size)


class _Shard(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: RankGroup) -> Tensor:
        ctx.group = group
        return take_features(x, group).clone(memory_format=torch.contiguous_format)  # of a single row too

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return all_gather_features(d, ctx.group), None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: RankGroup, partial_grad: bool) -> Tensor:
        ctx.group, ctx.partial_grad = group, partial_grad
        return all_gather_features(x, group).detach()  # no view, which autograd would not let users modify

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:
        back = reduce_scatter_features if ctx.partial_grad else take_features
        return back(d, ctx.group), None, None


def shard_features(x: Tensor, mesh: DeviceMesh | RankGroup | None) -> Tensor:
    """Forward: keep this rank's features of a replicated x; backward: all-gather of the gradient."""
    group = rank_group(mesh)
    if x.shape[-1] % group.size:
        raise ValueError(f"{group.size} ranks do not divide the {x.shape[-1]} features of the input {tuple(x.shape)}")
    return x if group.size == 1 else apply_function(_Shard, x, group)


def gather_features(x: Tensor, mesh: DeviceMesh | RankGroup | None, *, partial_grad: bool = False) -> Tensor:
    """Forward: all-gather of features; backward: this rank's slice of the gradient, where every rank computes the same
    from the result. Where each rank computes its own part, ``partial_grad=True`` makes the backward a reduce-scatter.
    """
    group = rank_group(mesh)
    return x if group.size == 1 else apply_function(_Gather, x, group, partial_grad)
