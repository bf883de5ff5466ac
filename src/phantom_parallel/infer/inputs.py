"""Rows of inputs in a file. A rank reads its own features of one batch at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from phantom_parallel.utils.arrays import FORMATS, open_array, readable

NAME = "x"  # of the array in a file that may hold several


@dataclass(frozen=True)
class Inputs:
    """``rows`` rows of ``width`` features. `read` takes a slice of rows and a slice of features."""

    path: Path
    rows: int
    width: int
    read: Callable[[slice, slice], Tensor]

    def batches(self, size: int) -> list[slice]:
        """All rows in order; the last batch may be smaller."""
        return [slice(first, min(first + size, self.rows)) for first in range(0, self.rows, size)]


def open_inputs(path: Path, width: int) -> Inputs:
    """Open a file .npy, or an .npz or .safetensors with an array x, of shape (rows, ``width``).

    Raises:
        ValueError: If the file is missing, damaged, or holds anything else.
    """
    if not path.is_file():
        raise ValueError(f"there is no file of inputs {path}: give one of {', '.join(FORMATS)}")
    if path.suffix not in FORMATS:
        raise ValueError(f"inputs {path} must be one of {', '.join(FORMATS)}, got {path.suffix or 'no suffix'!r}")
    with readable(path, "inputs"):
        array = open_array(path, NAME)
        shape = array.shape
        if len(shape) != 2 or shape[1] != width:
            raise ValueError(f"expected inputs of shape (rows, {width}), the model's width, got {shape}")
        if shape[0] == 0:
            raise ValueError(f"expected at least one row, got shape {shape}")

    def read(rows: slice, features: slice) -> Tensor:
        with readable(path, "inputs"):
            return array.read(rows, features)

    return Inputs(path, shape[0], width, read)
