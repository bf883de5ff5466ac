"""A third model family, one linear map, which the library does not know: registered from the tests alone."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from phantom_parallel import PhantomLinear, TensorLinear
from phantom_parallel.cost.layers import phantom_layer, tensor_layer
from phantom_parallel.cost.sizes import ModelSizes
from phantom_parallel.cost.steps import DTYPES, TrainingStep
from phantom_parallel.cost.terms import (
    OPTIMIZER_STATES,
    LayerCost,
    Memory,
    Shape,
    optimizer_of,
)
from phantom_parallel.families.base import Family
from phantom_parallel.families.registry import register_family
from phantom_parallel.infer.predictor import Predictor
from phantom_parallel.train.config import TrainConfig
from phantom_parallel.train.task import Task
from phantom_parallel.utils.arrays import generator
from phantom_parallel.utils.layout import BlockLayout, RowLayout
from phantom_parallel.utils.strategies import StrategyName, get_strategy

ROWS, HELD_OUT = 64, 16


@dataclass(frozen=True)
class TinyConfig:
    family: ClassVar[str] = "tiny"

    features: int
    strategy: StrategyName = "phantom"
    blocks: int | None = None
    ghosts: int | None = None

    def __post_init__(self) -> None:
        get_strategy(self.strategy, TinyFamily.strategies).check_blocks(self.blocks, self.ghosts)

    def check_ranks(self, ranks: int) -> None:
        get_strategy(self.strategy).check_ranks(ranks)
        layout_of(self, ranks)


def layout_of(config: Any, ranks: int) -> BlockLayout | RowLayout:
    if config.strategy == "phantom":
        return BlockLayout(config.features, config.features, config.blocks, config.ghosts, ranks)
    return RowLayout(config.features, config.features, ranks)


class Tiny(nn.Module):
    def __init__(
        self, config: TinyConfig, *, mesh: Any = None, device: Any = None, dtype: Any = None, wire: Any = "full"
    ) -> None:
        super().__init__()
        self.config, self.mesh, self.wire = config, mesh, wire
        where = {"mesh": mesh, "device": device, "dtype": dtype, "wire": wire}
        size = config.features
        if config.strategy == "phantom":
            self.map: nn.Module = PhantomLinear(size, size, blocks=config.blocks, ghosts=config.ghosts, **where)
        else:
            self.map = TensorLinear(size, size, **where)

    @property
    def shards_features(self) -> bool:
        return self.mesh is not None

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x)


@dataclass(frozen=True, kw_only=True)
class TinyTrainConfig(TrainConfig):
    family: ClassVar[str] = "tiny"
    named_data: ClassVar[tuple[str, ...]] = ("doubled",)

    features: int = 16
    """Features in and out."""
    batch: int = 16
    """Rows of a step."""
    data: str = "doubled"
    """The targets are twice the inputs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tiny().check_ranks(self.ranks)

    def tiny(self) -> TinyConfig:
        return TinyConfig(**{field.name: getattr(self, field.name) for field in fields(TinyConfig)})


class TinyTask(Task[TinyTrainConfig]):
    def __init__(self, config: TinyTrainConfig, parallel: Any) -> None:
        self.config, self.parallel = config, parallel
        self.model = Tiny(config.tiny(), mesh=parallel.tp, device=parallel.device, wire=config.wire)
        self.counts = True
        self.held_out = torch.arange(ROWS, ROWS + HELD_OUT)
        whole = torch.randn(ROWS + HELD_OUT, config.features, generator=generator(config.seed, 0, purpose=9))
        share = config.features // config.ranks
        self.x = whole[:, parallel.tp_rank * share : (parallel.tp_rank + 1) * share].contiguous()

    @staticmethod
    def check(config: TinyTrainConfig) -> None:
        if config.data != "doubled":
            raise ValueError(f"there is no data {config.data!r}: use doubled")

    @staticmethod
    def outline(config: TinyTrainConfig) -> nn.Module:
        return Tiny(config.tiny(), device="meta")

    def rows_of(self, step: int) -> Tensor:
        return torch.randint(ROWS, (self.config.batch,), generator=generator(self.config.seed, step, purpose=8))

    def loss(self, rows: Tensor) -> Tensor:
        return self.measure(rows)[0] / len(rows)

    def measure(self, rows: Tensor) -> Tensor:
        errors = (self.model(self.x[rows]) - 2 * self.x[rows]).square().sum() / self.config.features
        return torch.stack([errors, torch.zeros_like(errors)])

    def compile(self) -> None:
        pass


@dataclass(frozen=True)
class TinyShape(Shape):
    family: ClassVar[str] = "tiny"
    listed: ClassVar[tuple[str, ...]] = ("features", "batch")

    strategy: StrategyName
    features: int
    ranks: int = 1
    batch: int = 16
    blocks: int | None = None
    ghosts: int | None = None
    dp: int = 1
    word_bytes: int = 4
    wire: str = "full"
    optimizer: str = "adam"
    rank: int = 0

    def __post_init__(self) -> None:
        layout_of(self, self.ranks)

    @property
    def costs(self) -> tuple[LayerCost, ...]:
        layout, given = layout_of(self, self.ranks), {"input_grad": False, "wire": self.wire, "name": "map"}
        if isinstance(layout, BlockLayout):
            return (phantom_layer(layout, self.batch, **given),)
        return (tensor_layer(layout, self.batch, rank=self.rank, **given),)

    def same_as(self, index: int) -> int:
        return index

    @property
    def repeated(self) -> int:
        return 0

    @property
    def memory(self) -> Memory:
        weights = self.parameters * self.word_bytes
        kept = self.costs[0].kept * self.word_bytes
        return Memory(weights, weights, OPTIMIZER_STATES[self.optimizer] * weights, kept)


@dataclass(frozen=True, kw_only=True)
class TinySizes(ModelSizes):
    family: ClassVar[str] = "tiny"
    example: ClassVar[dict[str, Any]] = {"features": 64}

    features: int
    """Features in and out."""

    @property
    def summary(self) -> str:
        return f"{self.features} features"

    @property
    def maps(self) -> tuple[tuple[int, int], ...]:
        return ((self.features, self.features),)

    def shape(self, layout: Any, *, batch: int, **run: Any) -> TinyShape:
        cut = (layout.strategy, self.features, layout.ranks, batch, layout.blocks, layout.ghosts, layout.dp)
        return TinyShape(*cut, **run)


class TinyPredictor(Predictor):
    def features(self, config: TinyConfig) -> tuple[int, int]:
        return config.features, config.features

    def shape(self, config: TinyConfig, *, ranks: int, batch: int, word_bytes: int, wire: Any) -> TinyShape:
        given = (config.strategy, config.features, ranks, batch, config.blocks, config.ghosts)
        return TinyShape(*given, word_bytes=word_bytes, wire=wire)

    def baseline(self, model: Tiny) -> Tiny:
        return Tiny(TinyConfig(model.config.features, "tensor"), mesh=model.mesh, wire=model.wire)

    def baseline_words(self, config: TinyConfig, ranks: int) -> int:
        return config.features**2


class TinyFamily(Family):
    name: ClassVar[str] = "tiny"
    title: ClassVar[str] = "single linear maps"
    strategies: ClassVar[tuple[StrategyName, ...]] = ("phantom", "tensor")
    baseline: ClassVar[StrategyName] = "tensor"
    shown_settings: ClassVar[tuple[str, ...]] = ("features",)

    def model_config(self) -> type[TinyConfig]:
        return TinyConfig

    def model(self) -> type[Tiny]:
        return Tiny

    def train_config(self) -> type[TinyTrainConfig]:
        return TinyTrainConfig

    def task(self) -> type[TinyTask]:
        return TinyTask

    def shape(self, config: TinyTrainConfig) -> TinyShape:
        given = (config.strategy, config.features, config.ranks, config.batch // config.dp, config.blocks)
        optimizer = optimizer_of(config.optimizer, config.momentum)
        return TinyShape(*given, config.ghosts, config.dp, wire=config.wire, optimizer=optimizer)

    def predictor(self) -> TinyPredictor:
        return TinyPredictor()

    def sizes(self) -> type[TinySizes]:
        return TinySizes

    def build_step(self, shape: TinyShape, mesh: Any, *, device: str = "cpu") -> TrainingStep:
        dtype = DTYPES[shape.word_bytes]
        config = TinyConfig(shape.features, shape.strategy, shape.blocks, shape.ghosts)
        model = Tiny(config, mesh=mesh, device=device, dtype=dtype, wire=shape.wire)
        x = torch.randn(shape.batch, shape.features // shape.ranks, device=device, dtype=dtype)
        return TrainingStep(model, lambda: model(x).sum())


FAMILY = TinyFamily()
register_family("tiny", f"{__name__}:FAMILY")
