"""Data of a training: rows of inputs x and targets y, of which a rank holds or reads its own features only.

Every value depends on the seed and the row, not on the number of ranks or copies.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from phantom_parallel.distributed.context import ParallelContext
from phantom_parallel.distributed.objects import raise_on_all_ranks
from phantom_parallel.families.ffn.arrays import open_arrays
from phantom_parallel.families.ffn.digits import digits
from phantom_parallel.families.ffn.teacher import teach
from phantom_parallel.families.ffn.train_config import DATA_SETS, PIXELS, TEACHERS, FFNTrainConfig
from phantom_parallel.utils.arrays import StoredArray, generator, readable

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
    shares = [features // ranks for features in config.model_features]
    of_inputs, of_targets = (slice(rank * share, (rank + 1) * share) for share in shares)
    features, parallel = (of_inputs, of_targets), parallel or ParallelContext()
    if config.data in TEACHERS:
        _check_rows(config.samples, config)
        return Data(*teach(config, features, parallel), features)
    if config.data in PIXELS:
        data = Data(*digits(config.data, config.model_features[0], features), features)
        _check_rows(data.rows, config)
        return data
    error, group = None, None if parallel.single_process else parallel.group or dist.group.WORLD
    try:
        data = _read(Path(config.data), config.model_features, features)
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


def _read(path: Path, expected: tuple[int, int], features: tuple[slice, slice]) -> Data:
    """Read a user's arrays, whose inputs and targets have the ``expected`` numbers of features."""
    if not path.exists():
        raise ValueError(f"there is no data {path}: give {', '.join(DATA_SETS)}, or a folder or file of arrays x and y")
    with readable(path, "data"):
        x, y = open_arrays(path)
        if any(len(one.shape) != 2 for one in (x, y)) or x.shape[0] != y.shape[0]:
            raise ValueError(f"expected x (rows, features) and y with as many rows, got {x.shape} and {y.shape}")
        if (x.shape[1], y.shape[1]) != expected:
            raise ValueError(
                f"expected x (rows, {expected[0]}) and y (rows, {expected[1]}), the model's features, "
                f"got {x.shape} and {y.shape}"
            )
        of_inputs, of_targets = features
        return Data(_read_features(x, of_inputs), _read_features(y, of_targets), features, str(path))


def _read_features(array: StoredArray, features: slice) -> Any:
    """Map these features of all rows where the format allows it; otherwise read them, as float32."""
    if array.mapped is not None:
        return array.mapped[:, features]
    return array.read(slice(0, array.shape[0]), features).float()
