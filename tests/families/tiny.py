"""A third model family, one linear layer, which the library does not know: registered from the tests alone."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from phantom_parallel import PhantomLinear, TensorLinear
from phantom_parallel.cost.dryrun import DTYPES, TrainingStep
from phantom_parallel.cost.terms import Exchange, LayerCost, Shape, phantom_layer, tensor_layer
from phantom_parallel.families.base import Family
from phantom_parallel.families.registry import register_family
from phantom_parallel.train.config import TrainConfig
from phantom_parallel.train.task import Task
from phantom_parallel.utils.arrays import generator
from phantom_parallel.utils.layout import BlockLayout, RowLayout
from phantom_parallel.utils.settings import Features, PositiveInt, validate
from phantom_parallel.utils.strategies import get_strategy

ROWS, HELD_OUT = 64, 16


@dataclass(frozen=True)
class TinyConfig:
    family: ClassVar[str] = "tiny"

    features: Features
    """Features in and out."""
    strategy: Literal["phantom", "tensor"] = "phantom"
    """How the model is sharded over ranks."""
    blocks: PositiveInt | None = None
    """Blocks, for phantom."""
    ghosts: PositiveInt | None = None
    """Ghosts, for phantom."""

    def __post_init__(self) -> None:
        validate(self)
        get_strategy(self.strategy).check_blocks(self.blocks, self.ghosts)

    def check_ranks(self, ranks: int) -> None:
        self.layout(ranks)

    def layout(self, ranks: int) -> BlockLayout | RowLayout:
        if self.blocks is not None and self.ghosts is not None:
            return BlockLayout(self.features, self.features, self.blocks, self.ghosts, ranks)
        return RowLayout(self.features, self.features, ranks)

    @property
    def summary(self) -> str:
        return f"{self.features} features"

    @property
    def model_features(self) -> tuple[int, int]:
        return self.features, self.features

    @property
    def linear_features(self) -> tuple[tuple[int, int], ...]:
        return (self.model_features,)


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
    model_defaults: ClassVar[dict[str, Any]] = {"features": 16}

    model: TinyConfig
    """The model."""
    batch: Features = 16
    """Rows of a step."""
    data: str = "doubled"
    """The targets are twice the inputs."""


class TinyTask(Task[TinyTrainConfig]):
    def __init__(self, config: TinyTrainConfig, parallel: Any) -> None:
        self.config, self.parallel = config, parallel
        self.model = Tiny(config.model, mesh=parallel.tp, device=parallel.device, wire=config.wire)
        self.counts = True
        self.held_out = torch.arange(ROWS, ROWS + HELD_OUT)
        features = config.model.features
        whole = torch.randn(ROWS + HELD_OUT, features, generator=generator(config.seed, 0, purpose=9))
        share = features // config.ranks
        self.x = whole[:, parallel.tp_rank * share : (parallel.tp_rank + 1) * share].contiguous()

    @staticmethod
    def check(config: TinyTrainConfig) -> None:
        if config.data != "doubled":
            raise ValueError(f"there is no data {config.data!r}: use doubled")

    @staticmethod
    def outline(config: TinyTrainConfig) -> nn.Module:
        return Tiny(config.model, device="meta")

    def rows_of(self, step: int) -> Tensor:
        return torch.randint(ROWS, (self.config.batch,), generator=generator(self.config.seed, step, purpose=8))

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.x[rows], 2 * self.x[rows]

    def loss(self, rows: Tensor) -> Tensor:
        return self.measure(rows)[0] / len(rows)

    def measure(self, rows: Tensor) -> Tensor:
        x, y = self.load(rows)
        errors = (self.model(x) - y).square().sum() / self.config.model.features
        return torch.stack([errors, torch.zeros_like(errors)])


@dataclass(frozen=True)
class TinyShape(Shape):
    family: ClassVar[str] = "tiny"
    listed: ClassVar[tuple[str, ...]] = ("features", "batch")
    example: ClassVar[dict[str, Any]] = {"features": 64}

    model: TinyConfig

    @cached_property
    def terms(self) -> tuple[tuple[LayerCost, ...], tuple[Exchange, ...]]:
        layout, given = self.model.layout(self.ranks), {"input_grad": False, "wire": self.wire, "name": "map"}
        if isinstance(layout, BlockLayout):
            return (phantom_layer(layout, self.batch, **given),), ()
        return (tensor_layer(layout, self.batch, rank=self.rank, **given),), ()


def build_step(shape: TinyShape, mesh: Any, *, device: str = "cpu") -> TrainingStep:
    dtype = DTYPES[shape.word_bytes]
    model = Tiny(shape.model, mesh=mesh, device=device, dtype=dtype, wire=shape.wire)
    x = torch.randn(shape.batch, shape.model.features // shape.ranks, device=device, dtype=dtype)
    return TrainingStep(model, lambda: model(x).sum())


def as_tensor(model: Tiny) -> Tiny:
    return Tiny(TinyConfig(model.config.features, "tensor"), mesh=model.mesh, wire=model.wire)


FAMILY = Family(
    name="tiny",
    title="single linear layers",
    baseline="tensor",
    config=TinyConfig,
    model=Tiny,
    train_config=TinyTrainConfig,
    task=TinyTask,
    shape=TinyShape,
    build_step=build_step,
    as_tensor=as_tensor,
)
register_family("tiny", f"{__name__}:FAMILY")
