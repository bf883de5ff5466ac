"""Parameters sharded by rows over a mesh, and the base class of layers on such parameters."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from phantom_parallel.distributed.objects import all_gather_objects, check_agreement
from phantom_parallel.nn.init import draw_seed
from phantom_parallel.ops.blocks import check_real, is_creating_graph, refuse_transforms
from phantom_parallel.ops.collectives import RankGroup, flat_mesh


def shard_parameter(rows: Tensor, mesh: DeviceMesh | None, *, requires_grad: bool = True) -> nn.Parameter:
    """A parameter from this rank's rows: a DTensor with ``Shard(0)``, or without a mesh a plain parameter."""
    shard = rows if mesh is None else DTensor.from_local(rows, mesh, [Shard(0)], run_check=False)
    return nn.Parameter(shard, requires_grad)


class _ToLocal(Function):
    """``DTensor.to_local`` for a parameter, without computing the gradient's spec in every step."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.spec, ctx.parameter, ctx.version = parameter._spec, parameter, parameter._version
        return parameter._local_tensor.view_as(parameter._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        # Autograd's own check does not see this: operations on a DTensor count its versions, and not those of the shard
        # that is saved. Steps of optimizers with foreach=True or fused=True, torch counts for no DTensor.
        if ctx.parameter._version != ctx.version:
            shape = tuple(ctx.parameter.shape)
            raise RuntimeError(f"a parameter {shape} was modified by an inplace operation after the forward pass")
        if is_creating_graph():
            return DTensor.from_local(grad, ctx.spec.mesh, ctx.spec.placements, run_check=False)
        return DTensor(grad, ctx.spec, requires_grad=False)


def to_local(parameter: Tensor) -> Tensor:
    """This rank's shard of a parameter. No collective; the gradient gets the parameter's placements."""
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_compiling():
        return parameter.to_local(grad_placements=parameter.placements)
    refuse_transforms()
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


def check_settings(layer: nn.Module, mesh: DeviceMesh | None, dtype: torch.dtype | None, **settings: Any) -> None:
    """Raise ValueError if the dtype of a layer's parameters is complex, and RanksDisagree if ranks make others."""
    dtype = dtype or torch.get_default_dtype()
    check_real(dtype)
    name = type(layer).__name__
    check_agreement(f"a {name}", {"layer": name, **settings, "dtype": str(dtype)}, flat_mesh(mesh))


def check_features(layer: nn.Module, x: Tensor, features: int, group: RankGroup) -> None:
    """Raise ValueError unless the last dimension of x is this rank's share of ``features``."""
    expected = features // group.size
    if x.dim() == 0 or x.shape[-1] != expected:
        share = f", this rank's share of {features} over {group.size} ranks" if group.size > 1 else ""
        hint = ": shard it with shard_features(x, mesh), or in a plan pass input_layouts=Replicate()" if share else ""
        raise ValueError(
            f"{type(layer).__name__} takes {expected} features{share}, got an input of shape {tuple(x.shape)}{hint}"
        )


class FeatureSharded(nn.Module):
    """Base class of linear layers whose input and output features are sharded over a mesh."""

    in_features: int
    out_features: int
    bias: nn.Parameter | None
    mesh: DeviceMesh | None
    group: RankGroup

    def _empty(self, rows: int, *columns: int, **kwargs: Any) -> nn.Parameter:
        return shard_parameter(torch.empty(rows // self.group.size, *columns, **kwargs), self.mesh)

    def _local_bias(self) -> Tensor | None:
        return None if self.bias is None else to_local(self.bias)

    def _check_input(self, x: Tensor) -> None:
        check_features(self, x, self.in_features, self.group)

    def _empty_dense(self, like: Tensor) -> nn.Linear:
        """An uninitialized ``nn.Linear`` of this layer's size, made without drawing from torch's generator."""
        dense = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta", dtype=like.dtype)
        return dense.to_empty(device=like.device)

    def _rank_repr(self) -> str:
        if self.mesh is None:
            return ""
        wire = "" if self.group.wire == "full" else f", wire={self.group.wire}"
        return f", rank {self.group.rank} of {self.group.size}{wire}"
