"""Parameters cut by rows over a mesh, and what layers on such parameters share."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from phantom_parallel.distributed.objects import all_gather_objects
from phantom_parallel.nn.init import draw_seed
from phantom_parallel.ops.blocks import records_graph
from phantom_parallel.ops.collectives import Ranks


def shard_rows(rows: Tensor, mesh: DeviceMesh | None) -> nn.Parameter:
    """A parameter from this rank's rows: a DTensor cut on dimension 0, or without a mesh the rows themselves."""
    return nn.Parameter(rows if mesh is None else DTensor.from_local(rows, mesh, [Shard(0)], run_check=False))


class _LocalRows(Function):
    """``to_local`` for a parameter whose gradient is cut as it is: that gradient's spec is the parameter's own, and
    need not be worked out in every step.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.spec = parameter._spec
        return parameter._local_tensor.view_as(parameter._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if records_graph():
            return DTensor.from_local(grad, ctx.spec.mesh, ctx.spec.placements, run_check=False)
        return DTensor(grad, ctx.spec, requires_grad=False)


def local_rows(parameter: Tensor) -> Tensor:
    """This rank's rows of a parameter. Forward: none; backward: the gradient is cut as the parameter is."""
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_compiling():
        return parameter.to_local(grad_placements=parameter.placements)
    return _LocalRows.apply(parameter) if torch.is_grad_enabled() else parameter._local_tensor


def whole(parameter: Tensor) -> Tensor:
    """The whole parameter, detached, on every rank."""
    detached = parameter.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def shared_seed(seed: int | None, mesh: DeviceMesh | None) -> int:
    """The seed that every rank draws its own part with: the one given, or one from rank 0's default generator."""
    if seed is None:
        seed = draw_seed()  # on every rank, so that all default generators stay in step
        seed = seed if mesh is None else all_gather_objects(seed, mesh)[0]
    return seed


class FeatureSharded(nn.Module):
    """A linear layer whose features are cut over the ranks of ``mesh``: this rank's features in, this rank's features
    out.
    """

    in_features: int
    out_features: int
    bias: nn.Parameter | None
    mesh: DeviceMesh | None
    ranks: Ranks

    def _empty(self, rows: int, *columns: int, **kwargs: Any) -> nn.Parameter:
        return shard_rows(torch.empty(rows // self.ranks.size, *columns, **kwargs), self.mesh)

    def _check_input(self, x: Tensor) -> None:
        expected = self.in_features // self.ranks.size
        if x.shape[-1] != expected:
            share = (
                f", this rank's share of {self.in_features} over {self.ranks.size} ranks"
                if self.mesh is not None
                else ""
            )
            hint = (
                ": cut it with shard_features(x, mesh)"
                if self.mesh is not None and x.shape[-1] == self.in_features
                else ""
            )
            raise ValueError(
                f"{type(self).__name__} takes {expected} features{share}, got an input of shape {tuple(x.shape)}{hint}"
            )

    def _empty_dense(self, like: Tensor) -> nn.Linear:
        """An ``nn.Linear`` of this layer's size, to be filled. Made without drawing from torch's generator."""
        dense = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta", dtype=like.dtype)
        return dense.to_empty(device=like.device)

    def _describe_ranks(self) -> str:
        return "" if self.mesh is None else f", rank {self.ranks.rank} of {self.ranks.size}"
