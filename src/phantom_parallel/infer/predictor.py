"""The interface between ``phantom infer`` and a family whose models map rows of features to rows of features."""

from abc import ABC, abstractmethod
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from phantom_parallel.cost.terms import Shape
from phantom_parallel.families.registry import get_family
from phantom_parallel.nn.sharded import to_local
from phantom_parallel.ops.collectives import rank_group
from phantom_parallel.utils.wire import WireFormat


class RowModel(Protocol):
    """A module that takes and returns (rows, features). With ``shards_features``, these are this rank's features."""

    config: Any
    mesh: DeviceMesh | None
    wire: WireFormat

    @property
    def shards_features(self) -> bool: ...
    def __call__(self, x: Tensor) -> Tensor: ...
    def parameters(self) -> Any: ...


class Predictor(ABC):
    """A family's part of ``phantom infer``."""

    @abstractmethod
    def features(self, config: Any) -> tuple[int, int]:
        """Return the number of features of a row of inputs, and of outputs."""

    @abstractmethod
    def shape(self, config: Any, *, ranks: int, batch: int, word_bytes: int, wire: WireFormat) -> Shape:
        """Return the cost formulas of a model on ``ranks`` ranks for ``batch`` rows."""

    @abstractmethod
    def baseline(self, model: Any) -> RowModel:
        """Return the tensor-parallel model of the same function, on the same ranks. Every rank calls this."""

    @abstractmethod
    def baseline_words(self, config: Any, ranks: int) -> int:
        """Return the words that all ranks together need to build and hold the baseline, at least."""


def predictor_of(config: Any) -> Predictor:
    """Return the predictor of the family that a model's config belongs to."""
    predictor: type[Predictor] = get_family(config.family).require("predictor")
    return predictor()


def shape_of(model: RowModel, batch: int) -> Shape:
    """Return the cost formulas of a forward pass of ``batch`` rows."""
    word = next(model.parameters()).element_size()
    ranks = rank_group(model.mesh).size
    run: dict[str, Any] = {"ranks": ranks, "batch": batch, "word_bytes": word, "wire": model.wire}
    return predictor_of(model.config).shape(model.config, **run)


def own_features(model: RowModel) -> slice:
    """Return the features that this rank's model takes: its own, or all."""
    width, _ = predictor_of(model.config).features(model.config)
    if not model.shards_features:
        return slice(0, width)
    ranks = rank_group(model.mesh)
    share = width // ranks.size
    return slice(ranks.rank * share, (ranks.rank + 1) * share)


def to_model(rows: Tensor, model: RowModel) -> Tensor:
    """Convert rows to the device and the dtype of the model."""
    parameter = next(model.parameters())
    return rows.to(to_local(parameter).device, parameter.dtype)
