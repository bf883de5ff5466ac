"""Rows of inputs that lie in a file: a rank reads its own features of a batch at a time, and nothing is unpickled."""

import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

NAME = "x"  # of the array in a file that may hold several
FORMATS = (".npy", ".npz", ".safetensors")


@dataclass(frozen=True)
class Inputs:
    """``rows`` rows of ``width`` features; `read` takes first row, last row and features."""

    path: Path
    rows: int
    width: int
    read: Callable[[slice, slice], Tensor]

    def batches(self, size: int) -> list[slice]:
        """All rows in order; the last batch may be short."""
        return [slice(first, min(first + size, self.rows)) for first in range(0, self.rows, size)]


def open_inputs(path: Path, width: int) -> Inputs:
    """A file .npy, or an .npz or .safetensors with an array x: (rows, width) numbers. ValueError for anything else."""
    if not path.is_file():
        raise ValueError(f"there is no file of inputs {path}: give one of {', '.join(FORMATS)}")
    openers = dict(zip(FORMATS, (_open_npy, _open_npz, _open_safetensors), strict=True))
    if path.suffix not in openers:
        raise ValueError(f"inputs {path} must be one of {', '.join(FORMATS)}, got {path.suffix or 'no suffix'!r}")
    try:
        shape, read = openers[path.suffix](path)
        if len(shape) != 2 or shape[1] != width:
            raise ValueError(f"expected inputs of shape (rows, {width}), the model's width, got {shape}")
        if shape[0] == 0:
            raise ValueError(f"expected at least one row, got shape {shape}")
    except (SafetensorError, OSError, KeyError, EOFError, ValueError) as error:
        text = error.args[0] if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is not readable as inputs: {text}") from None
    except Exception as error:  # a broken zip raises whatever zipfile and zlib do
        raise ValueError(f"{path} is not readable as inputs: {type(error).__name__}: {error}") from None
    return Inputs(path, shape[0], shape[1], read)


Opened = tuple[tuple[int, ...], Callable[[slice, slice], Tensor]]


def _open_npy(path: Path) -> Opened:
    return _of_array(np.load(path, mmap_mode="r"))


def _of_array(array: Any) -> Opened:
    _check_numbers(array.dtype)

    def read(rows: slice, features: slice) -> Tensor:
        part = np.array(array[rows, features])  # a copy: torch wants memory that it may write to
        return torch.from_numpy(part.astype(part.dtype.newbyteorder("="), copy=False))

    return array.shape, read


def _check_numbers(dtype: Any) -> None:
    if dtype.kind not in "fiu":
        raise ValueError(f"inputs must be numbers, got {dtype}")


def _open_npz(path: Path) -> Opened:
    """Streamed, compressed or not: rows are read in order, so no more than a batch is held."""
    archive = zipfile.ZipFile(path)
    names = [name.removesuffix(".npy") for name in archive.namelist()]
    if NAME not in names:
        raise ValueError(f"there is no array {NAME!r} in it, only {', '.join(names) or 'nothing'}")
    member = archive.open(f"{NAME}.npy")
    version = np.lib.format.read_magic(member)
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, by_columns, dtype = header(member)
    _check_numbers(dtype)
    if by_columns or len(shape) != 2:
        with np.load(path) as file:
            return _of_array(file[NAME])
    start, row_bytes = member.tell(), shape[1] * dtype.itemsize
    if archive.getinfo(f"{NAME}.npy").file_size != start + shape[0] * row_bytes:
        raise ValueError(f"{NAME} is cut short: shape {shape} of {dtype} does not fit what is there")

    def read(rows: slice, features: slice) -> Tensor:
        member.seek(start + rows.start * row_bytes)
        wanted = (rows.stop - rows.start) * row_bytes
        found = member.read(wanted)
        if len(found) != wanted:
            raise OSError(f"{path} ended at row {rows.start + len(found) // row_bytes} of {shape[0]}")
        part = np.frombuffer(found, dtype).reshape(-1, shape[1])[:, features]
        return torch.from_numpy(part.astype(dtype.newbyteorder("=")))

    return shape, read


def _open_safetensors(path: Path) -> Opened:
    file = safe_open(path, framework="pt")
    names = list(file.keys())
    if NAME not in names:
        raise ValueError(f"there is no tensor {NAME!r} in it, only {', '.join(names) or 'nothing'}")
    part = file.get_slice(NAME)
    if not part.get_dtype().lstrip("B").startswith(("F", "I", "U")):
        raise ValueError(f"inputs must be numbers, got {part.get_dtype()}")
    return tuple(part.get_shape()), lambda rows, features: part[rows, features]
