"""Arrays in .npy, .npz and .safetensors files, read by rows and features, and random streams to draw data from.

Nothing is unpickled.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

FORMATS = (".npy", ".npz", ".safetensors")
_NUMBERS = re.compile(r"B?F(8|16|32|64)(_\w+)?|[IU](8|16|32|64)")  # dtypes of safetensors


class StoredArray(NamedTuple):
    """An array in a file: ``read`` reads rows and features of a two-dimensional one in the dtype of the file, and
    ``mapped`` is the memory-mapped array, for the format .npy.
    """

    shape: tuple[int, ...]
    read: Callable[[slice, slice], Tensor]
    mapped: NDArray[Any] | None = None


@contextmanager
def readable(path: Path, purpose: str) -> Iterator[None]:
    """Turn any error that a damaged file causes into a ValueError of one line, which names the file."""
    try:
        yield
    except Exception as error:  # numpy, zipfile and zlib raise errors of many types
        reason = " ".join(str(error).split())
        if not isinstance(error, ValueError | OSError | SafetensorError):
            reason = f"{type(error).__name__}: {reason}"
        raise ValueError(f"{path} is not readable as {purpose}: {reason}") from None


def open_array(path: Path, name: str) -> StoredArray:
    """Open a file .npy, or the array ``name`` of a file .npz, which is read into memory, or .safetensors; ValueError if
    there is no such array of real numbers. Damaged files cause other errors as well, now or when rows are read: use
    `readable` around both.
    """
    if path.suffix == ".safetensors":
        file = safe_open(path, framework="pt")
        _check_name(name, list(file.keys()))
        tensor = file.get_slice(name)
        _check_numbers(tensor.get_dtype(), _NUMBERS.fullmatch(tensor.get_dtype()) is not None)
        return StoredArray(tuple(tensor.get_shape()), lambda rows, features: tensor[rows, features])
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if path.suffix == ".npz":
        _check_name(name, array.files)
        array = array[name]
    _check_numbers(array.dtype, array.dtype.kind in "fiu" and array.dtype.itemsize <= 8)

    def read(rows: slice, features: slice) -> Tensor:
        # A copy to memory that torch may write to, in the byte order of this machine.
        return torch.from_numpy(np.array(array[rows, features], dtype=array.dtype.newbyteorder("="), order="C"))

    return StoredArray(array.shape, read, array if path.suffix == ".npy" else None)


def _check_name(name: str, names: list[str]) -> None:
    if name not in names:
        raise ValueError(f"there is no array {name!r} in it, only {', '.join(names) or 'nothing'}")


def _check_numbers(dtype: object, valid: bool) -> None:
    if not valid:
        raise ValueError(f"the array must hold real numbers of at most 64 bits, got {dtype}")


def derive_seed(seed: int, piece: int, *, purpose: int) -> int:
    """Derive the seed of one piece of one purpose, such as the rows of an epoch."""
    return (seed * 0x9E3779B97F4A7C15 + piece * 0xBF58476D1CE4E5B9 + purpose * 0x94D049BB133111EB) % (1 << 63)


def generator(seed: int, piece: int, *, purpose: int) -> torch.Generator:
    """Return a CPU generator seeded with `derive_seed`: its numbers do not depend on the rank that draws them."""
    return torch.Generator().manual_seed(derive_seed(seed, piece, purpose=purpose))
