"""Data parallelism: copies of a model that average their gradients, and FSDP2, which shards the weights besides.

With FSDP2 every rank holds a part of each weight, gathers a layer's weights to use them, and works on rows of its own:

    forward    all-gather a group's parameters   (R-1)/R of their size to send
    backward   all-gather them again, if they were freed after forward; reduce-scatter their gradients

A group is a layer, or what is left of the model around the layers. A group that backward needs first is not freed after
forward: the last layer, and the rest of the model. ``reshard_after_forward=False`` frees none, which saves the second
all-gather and keeps the whole model on every rank from forward to backward.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from phantom_parallel.ops.collectives import rank_group
from phantom_parallel.utils.layout import buckets

_c10d = torch.ops._c10d_functional


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def average_gradients(model: nn.Module, mesh: DeviceMesh | None) -> None:
    """Replace each gradient by its mean over the copies along ``mesh``: an all-reduce of each bucket of gradients of a
    dtype, all under way together.
    """
    ranks = rank_group(mesh)
    if ranks.size == 1:
        return
    parts = [local_part(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    parts = [part for part in parts if part.numel()]
    under_way = list[tuple[list[Tensor], Tensor]]()
    for dtype in dict.fromkeys(part.dtype for part in parts):
        alike = [part for part in parts if part.dtype == dtype]
        for indices in buckets([part.nbytes for part in alike]):
            bucket = [alike[index] for index in indices]
            flat = torch.cat([part.flatten() for part in bucket])
            under_way.append((bucket, _c10d.all_reduce_(flat, "sum", ranks.name)))
    for bucket, flat in under_way:
        totals = _c10d.wait_tensor(flat).split([part.numel() for part in bucket])
        for part, total in zip(bucket, totals, strict=True):
            torch.div(total.view_as(part), ranks.size, out=part)


def shard_fully(
    model: nn.Module, layers: nn.ModuleList, mesh: DeviceMesh, *, reshard_after_forward: bool = True
) -> None:
    """Shard a model over ``mesh`` in place by ``fully_shard``: a group for each layer, in order, and for the rest."""
    last = len(layers) - 1
    groups: list[Any] = [
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward and index < last)
        for index, layer in enumerate(layers)
    ]
    root: Any = fully_shard(model, mesh=mesh)
    groups.insert(0, root)
    for group, following in pairwise(groups):
        group.set_modules_to_forward_prefetch([following])
    if mesh.device_type == "cpu":  # which has no streams that would overlap a collective with the layer before
        root._set_unshard_async_op(True)
    if not rank_group(mesh).native:
        for group in groups:
            group.set_custom_all_gather(_AllGather())
            group.set_custom_reduce_scatter(_ReduceScatter())
            group.set_force_sum_reduction_for_comms(True)


def reduce_gradients(model: nn.Module, reduce: bool) -> None:
    """Set whether the next backward pass of a fully sharded model reduces gradients, or accumulates whole ones."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(reduce)


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile the forward pass of each layer in place: hooks around a fully sharded model would prevent more."""
    for layer in layers:
        layer.forward = torch.compile(layer.forward)


class _Buffers:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Buffers):
    """An all-gather built from all-to-all."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        copies = input_tensor.repeat(group.size())
        return dist.all_to_all_single(output_tensor, copies, group=group, async_op=async_op)


class _ReduceScatter(_Buffers):
    """A reduce-scatter built from all-to-all: the sum is this rank's own."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        assert op == dist.ReduceOp.SUM
        assert not async_op
        arrived = torch.empty_like(input_tensor)
        dist.all_to_all_single(arrived, input_tensor, group=group)
        torch.sum(arrived.view(group.size(), -1), 0, out=output_tensor)
        return None
