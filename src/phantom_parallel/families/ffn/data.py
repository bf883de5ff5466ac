"""What is learnt: rows of inputs x and targets y, of which a rank holds or reads its own features only.

Every number depends on the seed and the row, never on the ranks or copies that share the work.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phantom_parallel.distributed.context import ParallelContext
from phantom_parallel.families.ffn.digits import digits
from phantom_parallel.families.ffn.teacher import teach
from phantom_parallel.families.ffn.train_config import DATA_SETS, DIGITS, TEACHERS, FFNTrainConfig
from phantom_parallel.utils.seeds import generator

_HELD_OUT = 8  # one row of so many is kept out of training


@dataclass(frozen=True)
class Data:
    """This rank's features of all rows. ``x`` and ``y`` may lie in a file: only rows that are taken are read."""

    x: Any  # (rows, features): a tensor or a memory-mapped array
    y: Any
    features: slice  # which ones of all

    @property
    def rows(self) -> int:
        return int(self.x.shape[0])

    @property
    def training_rows(self) -> int:
        """The first ones; the rest are held out."""
        return self.rows - self.rows // _HELD_OUT

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these rows, in float32."""
        x, y = (_rows_of(array, rows) for array in (self.x, self.y))
        return x, y


def _rows_of(array: Any, rows: Tensor) -> Tensor:
    if isinstance(array, Tensor):
        return array[rows]
    return torch.from_numpy(np.ascontiguousarray(array[rows.numpy()], dtype=np.float32))


class Batches:
    """Which rows a step trains on: all of them once in an order drawn for each epoch, and so on."""

    def __init__(self, rows: int, batch: int, seed: int) -> None:
        self._rows, self._batch, self._seed = rows, batch, seed
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def rows_of(self, step: int) -> Tensor:
        """(batch,), for all copies together: a function of the seed and the step."""
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
    """The data of a training, with the features of rank ``rank`` of ``ranks``. With a parallel context, all its ranks
    call this and share the work of a teacher.
    """
    share = config.width // ranks
    features = slice(rank * share, (rank + 1) * share)
    if config.data in TEACHERS:
        _check_rows(config.samples, config)
        return Data(*teach(config, features, parallel or ParallelContext()), features)
    if config.data == DIGITS:
        data = Data(*digits(config.width, features), features)
    else:
        data = _read(Path(config.data), config.width, features)
    _check_rows(data.rows, config)
    return data


def check_data(config: FFNTrainConfig) -> None:
    """Whether `open_data` will find what it needs, without asking a teacher."""
    if config.data in TEACHERS:
        _check_rows(config.samples, config)
    else:
        open_data(config)


def _check_rows(rows: int, config: FFNTrainConfig) -> None:
    held = rows // _HELD_OUT
    if held < config.dp or rows - held < config.batch:
        raise ValueError(
            f"{rows} rows are too few for batch={config.batch} and dp={config.dp}: "
            f"one in {_HELD_OUT} is held out, and the rest must fill a batch"
        )


def _read(path: Path, width: int, features: slice) -> Data:
    """A folder with x.npy and y.npy, which are memory-mapped; or an .npz or .safetensors file with arrays x and y."""
    if not path.exists():
        raise ValueError(f"there is no data {path}: give {', '.join(DATA_SETS)}, or a folder or file of arrays x and y")
    try:
        if path.is_dir():
            x, y = (np.load(path / f"{name}.npy", mmap_mode="r") for name in "xy")
        elif path.suffix == ".npz":
            with np.load(path) as file:
                x, y = (file[name] for name in "xy")
        elif path.suffix == ".safetensors":
            return _read_safetensors(path, width, features)
        else:
            raise ValueError("expected a folder with x.npy and y.npy, or a file .npz or .safetensors")
        _check_arrays(path, width, x.shape, y.shape)
        for name, array in (("x", x), ("y", y)):
            if array.dtype.kind not in "fiu":
                raise ValueError(f"{name} must hold numbers, got {array.dtype}")
    except (SafetensorError, OSError, KeyError, EOFError, ValueError) as error:
        raise ValueError(f"{path} is not readable as data: {error}") from None
    except Exception as error:  # a broken zip raises whatever zipfile and zlib do
        raise ValueError(f"{path} is not readable as data: {type(error).__name__}: {error}") from None
    return Data(x[:, features], y[:, features], features)


def _read_safetensors(path: Path, width: int, features: slice) -> Data:
    with safe_open(path, framework="pt") as file:
        parts = [file.get_slice(name) for name in "xy"]
        _check_arrays(path, width, *(tuple(part.get_shape()) for part in parts))
        x, y = (part[:, features].float() for part in parts)
    return Data(x, y, features)


def _check_arrays(path: Path, width: int, x: tuple[int, ...], y: tuple[int, ...]) -> None:
    if len(x) != 2 or x != y or x[1] != width:
        raise ValueError(f"expected x and y of shape (rows, {width}), the model's width, got {x} and {y}")
