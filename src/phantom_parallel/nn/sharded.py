"""Parameters sharded by rows over a mesh, and the base class of layers on such parameters."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from phantom_parallel.distributed.objects import all_gather_objects
from phantom_parallel.nn.init import draw_seed
from phantom_parallel.ops.blocks import is_creating_graph
from phantom_parallel.ops.levels import Group


def shard_parameter(rows: Tensor, mesh: DeviceMesh | None) -> nn.Parameter:
    """A parameter from this rank's rows: a DTensor with ``Shard(0)``, or without a mesh a plain parameter."""
    return nn.Parameter(rows if mesh is None else DTensor.from_local(rows, mesh, [Shard(0)], run_check=False))


class _ToLocal(Function):
    """``DTensor.to_local`` for a parameter whose gradient has the parameter's own placements: the gradient's spec need
    not be computed in every step.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.spec = parameter._spec
        return parameter._local_tensor.view_as(parameter._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if is_creating_graph():
            return DTensor.from_local(grad, ctx.spec.mesh, ctx.spec.placements, run_check=False)
        return DTensor(grad, ctx.spec, requires_grad=False)


def to_local(parameter: Tensor) -> Tensor:
    """This rank's shard of a parameter. No collective; the gradient gets the parameter's placements."""
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_compiling():
        return parameter.to_local(grad_placements=parameter.placements)
    return _ToLocal.apply(parameter) if torch.is_grad_enabled() else parameter._local_tensor


def full_tensor(parameter: Tensor) -> Tensor:
    """The full parameter, detached. Every rank calls this: a DTensor is all-gathered."""
    detached = parameter.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def broadcast_seed(seed: int | None, mesh: DeviceMesh | None) -> int:
    """The given seed, or one that rank 0 draws from its default generator; the same on every rank."""
    if seed is None:
        seed = draw_seed()  # on every rank, so that all default generators stay in sync
        seed = seed if mesh is None else all_gather_objects(seed, mesh)[0]
    return seed


class FeatureSharded(nn.Module):
    """Base class of linear layers whose input and output features are sharded over a mesh."""

    in_features: int
    out_features: int
    bias: nn.Parameter | None
    mesh: DeviceMesh | None
    group: Group

    def _empty(self, rows: int, *columns: int, **kwargs: Any) -> nn.Parameter:
        return shard_parameter(torch.empty(rows // self.group.size, *columns, **kwargs), self.mesh)

    def _check_input(self, x: Tensor) -> None:
        expected = self.in_features // self.group.size
        if x.dim() and x.shape[-1] == expected:
            return
        share = hint = ""
        if self.mesh is not None:
            share = f", this rank's share of {self.in_features} over {self.group.size} ranks"
            if x.dim() and x.shape[-1] == self.in_features:
                hint = (
                    ": shard it with shard_features(x, mesh), or in a parallelize_module plan pass "
                    "input_layouts=Replicate()"
                )
        raise ValueError(
            f"{type(self).__name__} takes {expected} features{share}, got an input of shape {tuple(x.shape)}{hint}"
        )

    def _empty_dense(self, like: Tensor) -> nn.Linear:
        """An uninitialized ``nn.Linear`` of this layer's size, made without drawing from torch's generator."""
        dense = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta", dtype=like.dtype)
        return dense.to_empty(device=like.device)

    def _rank_repr(self) -> str:
        if self.mesh is None:
            return ""
        wire = "" if self.group.wire == "full" else f", wire={self.group.wire}"
        return f", rank {self.group.rank} of {self.group.size}{wire}"
