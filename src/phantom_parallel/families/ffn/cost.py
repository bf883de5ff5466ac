"""What one rank of an `FFN` computes, sends and keeps in a training step, and that step for dry runs and timing."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from phantom_parallel.cost import terms
from phantom_parallel.cost.dryrun import DTYPES, FAKE, TrainingStep, build_model
from phantom_parallel.cost.terms import Exchange, Group, LayerCost, Memory, Shape
from phantom_parallel.distributed.pipeline import Pipeline
from phantom_parallel.families.ffn.config import FFNConfig
from phantom_parallel.families.ffn.model import FFN
from phantom_parallel.utils.layout import BlockLayout

# Activations whose derivative needs the input; that of relu and tanh needs the output only.
KEEPS_INPUT = ("gelu", "silu")


@dataclass(frozen=True)
class FFNShape(Shape):
    """An FFN and how it is run, for example ``FFNShape.of(width=1024, depth=2, strategy="tensor", ranks=4)``."""

    family: ClassVar[str] = "ffn"
    listed: ClassVar[tuple[str, ...]] = ("width", "depth", "batch")
    example: ClassVar[dict[str, Any]] = {"width": 16384, "depth": 4}

    model: FFNConfig
    input_grad: bool = False  # whether the gradient of the input is computed as well

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.terms is not None  # layouts that are not possible raise here

    @cached_property
    def terms(self) -> tuple[tuple[LayerCost, ...], tuple[Exchange, ...]]:
        depth = self.model.depth
        if self.splits_work:
            costs: dict[int, LayerCost] = {}
            for index in range(depth):  # layers repeat: only those that differ are computed
                same = index if index in (0, depth - 1) else 1 + (index - 1) % 2  # those in between alternate at most
                costs[index] = replace(costs[same], name=f"layers.{index}") if same in costs else self._layer(index)
            return tuple(costs.values()), ()
        if self.stage is None:
            kept = depth - 1 if self.reshard_after_forward else 0
            groups = [Group((index,), index >= kept) for index in range(depth)]
            return terms.fully_sharded(self.dense(batch=self.batch // self.ranks).costs, groups, self.ranks, self.rank)
        micro_batch = self.micro_batch()
        layers = tuple(self.stage.cost(micro_batch.costs[index]) for index in self.stage.own)
        return layers, self.stage.exchanges(micro_batch.batch * self.model.width, self.wire)

    def _layer(self, index: int) -> LayerCost:
        """A layer with the activation before it."""
        layout, last = self.model.layout_of(index, self.ranks), index == self.model.depth - 1
        given: dict[str, Any] = {"bias": self.model.bias, "wire": self.wire, "name": f"layers.{index}"}
        inner = given | {"input_grad": self.input_grad or index > 0}
        if isinstance(layout, BlockLayout):
            cost = terms.phantom_layer(layout, self.batch, rank=self.rank, **inner)
        elif self.model.low_rank is not None:
            cost = terms.low_rank_layer(layout, self.model.low_rank, self.batch, **inner)
        elif self.grid > 1:
            cost = terms.grid_layer(layout, self.batch, self.grid, transposed=index % 2 == 1, **inner)
        elif self.strategy != "megatron":
            cost = terms.tensor_layer(layout, self.batch, rank=self.rank, **inner)
        elif index % 2:
            cost = terms.row_layer(layout, self.batch, **given)
        else:
            cost = terms.column_layer(layout, self.batch, gather=last, **inner)
        words = self._words_before(index) if index else 0
        # read, write; read what was kept and the gradient, write the gradient
        return replace(cost, streamed=(2 * words, 3 * words))

    def _words_before(self, index: int) -> int:
        """Words of a rank's features before layer ``index``; between pairs of Megatron's they are whole."""
        whole = self.strategy == "megatron" and index % 2 == 0
        return self.batch * self.model.width // (1 if whole else self.ranks)

    @property
    def repeated(self) -> int:
        """The row layers' bias of the strategy megatron."""
        rows = range(1, self.model.depth, 2) if self.strategy == "megatron" and self.model.bias else ()
        return sum(self.model.features_of(index)[1] for index in rows)

    @property
    def memory(self) -> Memory:
        kept = super().memory
        return replace(kept, activations=kept.activations + self.word_bytes * self._kept_between())

    def _kept_between(self) -> int:
        """Words that the activations between layers keep besides what the layers keep."""
        activation = self.model.activation
        if self.stage is not None:
            words = self.batch // self.stage.micro_batches * self.model.width
            activated = len(self.stage.own) - 1 if activation in KEEPS_INPUT else 0
            return activated * self.stage.in_flight * words
        extra = 0
        for index in range(1, self.model.depth):
            if activation in KEEPS_INPUT:
                extra += self._words_before(index)
            if self.strategy == "tensor" and self.ranks > 1 and activation in ("relu", "tanh"):
                extra += self._words_before(index)  # the output, of which the layer keeps only the gathered copy
        return extra


def build_step(shape: FFNShape, mesh: DeviceMesh | None, *, device: str = "cpu") -> TrainingStep:
    """The model on this rank, and its forward pass on random rows; the loss is the sum of the outputs."""
    dtype, where = DTYPES[shape.word_bytes], "cpu" if device == FAKE else device
    model = build_model(FFN, shape, mesh, device)
    features = shape.model.model_features[0] // (shape.ranks if model.shards_features else 1)
    rows = shape.batch // shape.ranks if shape.strategy == "fsdp" else shape.batch
    x = torch.randn(rows, features, device=where, dtype=dtype, requires_grad=shape.input_grad)
    if shape.stage is None or mesh is None:
        return TrainingStep(model, lambda: model(x).sum())

    def run(entered: Tensor, targets: Tensor | None) -> Tensor:
        return model(entered) if targets is None else model(entered).sum()

    settings: dict[str, Any] = {"micro_batches": shape.stage.micro_batches, "device": torch.device(where)}
    settings |= {"stream": (shape.model.width,), "dtype": dtype, "wire": shape.wire}
    pipeline = Pipeline(model, run, mesh, **settings)
    return TrainingStep(model, lambda: pipeline.forward_backward(x, x), pipeline=pipeline)


# Width, depth, batch and ghosts of steps that are timed on local ranks. Those of calibration go from layers that are
# all overhead to layers that fill the memory; held out are sizes that it does not measure as such.
_CALIBRATED = ((512, 3, 64, 8), (1024, 2, 32, 8), (2048, 2, 32, 8), (2048, 3, 128, 8), (4096, 2, 32, 8))
_HELD_OUT = (
    *((1536, 3, 48, 8), (1536, 2, 192, 16), (3072, 2, 48, 16)),
    *((3072, 3, 96, 32), (768, 4, 96, 8), (768, 2, 24, 4)),
)


def step_shapes(ranks: int, *, held_out: bool) -> list[dict[str, Shape]]:
    """Steps that are timed on local ranks, of a phantom model and of its baseline."""
    if held_out:
        return [_pair(ranks, *size, blocks) for size in _HELD_OUT for blocks in (ranks, 2 * ranks)]
    return [_pair(ranks, *size, max(ranks, 2)) for size in ((64 * ranks, 4, 16, 8), *_CALIBRATED)]


def _pair(ranks: int, width: int, depth: int, batch: int, ghosts: int, blocks: int) -> dict[str, Shape]:
    model = FFNConfig(width, depth, blocks=blocks, ghosts=ghosts)
    phantom = FFNShape(model, ranks=ranks, batch=batch, optimizer="sgd")
    return {"phantom": phantom, "tensor": phantom.with_strategy("tensor")}
