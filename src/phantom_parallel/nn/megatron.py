"""Megatron's column and row styles: torch's own at full precision, and the same with another format on the wire."""

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from phantom_parallel.nn.sharded import to_local
from phantom_parallel.ops.collectives import RankGroup, rank_group
from phantom_parallel.ops.features import gather_features
from phantom_parallel.ops.tensor import Later, column_linear, row_embedding, row_linear, start_sum, sum_over_ranks
from phantom_parallel.utils.strategies import WireFormat


def column_style(wire: WireFormat = "full", *, gather: bool = False, in_parts: bool = False) -> ParallelStyle:
    """The style of a linear layer sharded by output features. Output: this rank's features, or with ``gather`` all.
    ``in_parts``: with ``begin`` and ``end``, between which an exchange is in flight: row layers' forward, others' back.
    """
    if wire == "full" and not in_parts:
        return ColwiseParallel(output_layouts=Replicate() if gather else None)
    return _WireStyle(ColwiseParallel(), _ColumnLinear, wire, gather=gather)


def row_style(wire: WireFormat = "full", *, embedding: bool = False, in_parts: bool = False) -> ParallelStyle:
    """The style of a linear layer sharded by input features, or an embedding by tokens. Output: all features."""
    if wire == "full" and not in_parts:
        return RowwiseParallel(input_layouts=Replicate() if embedding else None)
    return _WireStyle(RowwiseParallel(), _RowEmbedding if embedding else _RowLinear, wire)


class _ColumnLinear(nn.Linear):
    group: RankGroup
    gather: bool

    def forward(self, x: Tensor) -> Tensor:
        z = column_linear(x, to_local(self.weight), _local_bias(self), group=self.group)
        return gather_features(z, self.group) if self.gather else z

    def begin(self, x: Tensor) -> tuple[Tensor, Later]:
        later: Later = []
        return sum_over_ranks(x, self.group, later), later

    def end(self, begun: tuple[Tensor, Later]) -> Tensor:
        return column_linear(begun[0], to_local(self.weight), _local_bias(self), group=self.group, later=begun[1])


class _RowLinear(nn.Linear):
    group: RankGroup

    def forward(self, x: Tensor) -> Tensor:
        return row_linear(x, to_local(self.weight), _local_bias(self), group=self.group)

    def begin(self, x: Tensor) -> tuple[Tensor, Later]:
        z = F.linear(x, to_local(self.weight))  # a bias would be added later: layers in parts have none
        return z, [start_sum(z.detach(), self.group)]

    def end(self, begun: tuple[Tensor, Later]) -> Tensor:
        return sum_over_ranks(begun[0], self.group, begun[1])


class _RowEmbedding(nn.Embedding):
    group: RankGroup

    def forward(self, tokens: Tensor) -> Tensor:
        return row_embedding(tokens, to_local(self.weight), group=self.group)


def _local_bias(linear: nn.Linear) -> Tensor | None:
    return None if linear.bias is None else to_local(linear.bias)


class _WireStyle(ParallelStyle):
    """Parameters as a style of torch shards them; the products are local, and the exchanges are ours. The module itself
    must change, as `parallelize_module` discards what a style returns for a child.
    """

    def __init__(self, style: ColwiseParallel | RowwiseParallel, kind: type[nn.Module], wire: WireFormat, **more: bool):
        super().__init__()
        self.style, self.kind, self.wire, self.more = style, kind, wire, more

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style, is_embedding = self.style, isinstance(module, nn.Embedding)
        style.src_data_rank = self.src_data_rank
        partition = style._partition_embedding_fn if is_embedding else style._partition_linear_fn
        distribute_module(module, device_mesh, partition)
        module.__class__ = self.kind
        module.__dict__.update(self.more, group=rank_group(device_mesh, self.wire))
        return module
