"""Megatron's column and row styles: torch's own at full precision, and the same with another format on the wire."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from phantom_parallel.nn.sharded import to_local
from phantom_parallel.ops.collectives import RankGroup, rank_group
from phantom_parallel.ops.features import gather_features
from phantom_parallel.ops.megatron import column_linear, row_embedding, row_linear
from phantom_parallel.utils.strategies import WireFormat


def column_style(wire: WireFormat = "full", *, gather: bool = False) -> ParallelStyle:
    """The style of a linear layer sharded by output features. Input: all features; output: this rank's, or with
    ``gather`` all of them.
    """
    if wire == "full":
        return ColwiseParallel(output_layouts=Replicate() if gather else None)
    return _WireColumn(wire, gather)


def row_style(wire: WireFormat = "full", *, embedding: bool = False) -> ParallelStyle:
    """The style of a linear layer sharded by input features, or of an embedding sharded by tokens. Output: all
    features.
    """
    if wire == "full":
        return RowwiseParallel(input_layouts=Replicate() if embedding else None)
    return _WireRow(wire)


class _ColumnLinear(nn.Linear):
    group: RankGroup
    gather: bool

    def forward(self, x: Tensor) -> Tensor:
        z = column_linear(x, to_local(self.weight), _local_bias(self), group=self.group)
        return gather_features(z, self.group) if self.gather else z


class _RowLinear(nn.Linear):
    group: RankGroup

    def forward(self, x: Tensor) -> Tensor:
        return row_linear(x, to_local(self.weight), _local_bias(self), group=self.group)


class _RowEmbedding(nn.Embedding):
    group: RankGroup

    def forward(self, tokens: Tensor) -> Tensor:
        return row_embedding(tokens, to_local(self.weight), group=self.group)


class _WireColumn(ColwiseParallel):
    """Parameters as `ColwiseParallel` shards them; the products are local, and the exchanges are ours."""

    def __init__(self, wire: WireFormat, gather: bool) -> None:
        super().__init__()
        self.wire, self.gather = wire, gather

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _become(_ColumnLinear, module, device_mesh, self._partition_linear_fn, self.wire, gather=self.gather)


class _WireRow(RowwiseParallel):
    """Parameters as `RowwiseParallel` shards them; the products are local, and the exchanges are ours."""

    def __init__(self, wire: WireFormat) -> None:
        super().__init__()
        self.wire = wire

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, nn.Embedding):
            return _become(_RowEmbedding, module, device_mesh, self._partition_embedding_fn, self.wire)
        return _become(_RowLinear, module, device_mesh, self._partition_linear_fn, self.wire)


def _become(
    kind: type[Any], module: nn.Module, mesh: DeviceMesh, partition: Any, wire: WireFormat, **settings: bool
) -> nn.Module:
    """Shard a module's parameters, and give it the forward of ``kind``. The module itself must change, as
    `parallelize_module` discards what a style returns for a child.
    """
    distribute_module(module, mesh, partition)
    module.__class__ = kind
    module.__dict__.update(settings, group=rank_group(mesh, wire))
    return module


def _local_bias(linear: nn.Linear) -> Tensor | None:
    return None if linear.bias is None else to_local(linear.bias)
