"""Arrays in .npy, .npz and .safetensors files, read by rows and features.

Nothing is unpickled. Headers are not trusted: the size of a declared shape is compared with the size of the file before
anything is mapped or allocated.
"""

import math
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phantom_parallel.utils.files import check_regular

FORMATS = (".npy", ".npz", ".safetensors")
_CHUNK_BYTES = 16 << 20  # of rows that `chunks` returns together
# The largest ratio of uncompressed to compressed bytes, for the methods that NumPy writes.
_MAX_RATIO = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}
_NUMBERS = re.compile(r"B?F(8|16|32|64)(_\w+)?|[IU](8|16|32|64)")  # dtypes of safetensors


@dataclass(frozen=True)
class StoredArray:
    """An array in a file.

    Args:
        shape: The shape.
        read: Reads rows and features of a two-dimensional array, in the dtype of the file.
        mapped: The memory-mapped array, for the format .npy.
    """

    shape: tuple[int, ...]
    read: Callable[[slice, slice], Tensor]
    mapped: NDArray[Any] | None = None

    def chunks(self) -> list[slice]:
        """All rows in order, in pieces of a few megabytes."""
        rows = max(1, _CHUNK_BYTES // max(1, 8 * math.prod(self.shape[1:])))
        return [slice(first, min(first + rows, self.shape[0])) for first in range(0, self.shape[0], rows)]


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
    """Open a file .npy, or the array ``name`` of a file .npz or .safetensors.

    Raises:
        ValueError: If there is no such array, or it does not hold real numbers of at most 64 bits. Damaged files cause
            other errors as well, now or when rows are read: use `readable` around both.
    """
    check_regular(path)
    if path.suffix == ".npy":
        return _open_npy(path)
    return _open_npz(path, name) if path.suffix == ".npz" else _open_safetensors(path, name)


def _open_npy(path: Path) -> StoredArray:
    with open(path, "rb") as file:
        shape, by_columns, dtype = _read_header(file, path.stat().st_size)
        array = np.memmap(path, dtype, "r", file.tell(), shape, "F" if by_columns else "C")

    def read(rows: slice, features: slice) -> Tensor:
        return _to_tensor(array[rows, features])

    return StoredArray(shape, read, array)


def _open_npz(path: Path, name: str) -> StoredArray:
    """Rows are streamed in order, so that no more than those of one call are held."""
    archive = zipfile.ZipFile(path)
    names = [entry.removesuffix(".npy") for entry in archive.namelist()]
    if name not in names:
        raise ValueError(f"there is no array {name!r} in it, only {', '.join(names) or 'nothing'}")
    entry = archive.getinfo(f"{name}.npy")
    if entry.compress_type not in _MAX_RATIO:
        raise ValueError(
            f"{name} is compressed by a method that NumPy does not write: save it with np.savez_compressed"
        )
    held = min(entry.compress_size, path.stat().st_size)
    if entry.file_size > _MAX_RATIO[entry.compress_type] * held:
        raise ValueError(f"{name} declares {entry.file_size:,} bytes, which do not fit into the {held:,} bytes it has")
    member = archive.open(entry)
    shape, by_columns, dtype = _read_header(member, entry.file_size)
    start, row_bytes = member.tell(), math.prod(shape[1:]) * dtype.itemsize
    if by_columns:

        @cache  # rows are not together: all are read, when the first are needed
        def whole() -> NDArray[Any]:
            return np.frombuffer(_read_bytes(member, shape[0] * row_bytes), dtype).reshape(shape, order="F")

        return StoredArray(shape, lambda rows, features: _to_tensor(whole()[rows, features]))

    def read(rows: slice, features: slice) -> Tensor:
        first = start + rows.start * row_bytes
        if member.tell() != first:  # the checksum is compared at the end if all is read in order
            member.seek(first)
        data = _read_bytes(member, (rows.stop - rows.start) * row_bytes)
        return _to_tensor(np.frombuffer(data, dtype).reshape(-1, *shape[1:])[:, features])

    return StoredArray(shape, read)


def _open_safetensors(path: Path, name: str) -> StoredArray:
    file = safe_open(path, framework="pt")
    names = list(file.keys())
    if name not in names:
        raise ValueError(f"there is no tensor {name!r} in it, only {', '.join(names) or 'nothing'}")
    tensor = file.get_slice(name)
    if not _NUMBERS.fullmatch(tensor.get_dtype()):
        raise _not_numbers(tensor.get_dtype())
    return StoredArray(tuple(tensor.get_shape()), lambda rows, features: tensor[rows, features])


def _read_header(file: IO[bytes], size: int) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read shape, column-major order and dtype, for a file of ``size`` bytes."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"the version of the format .npy must be 1.0, 2.0 or 3.0, got {version}")
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, by_columns, dtype = header(file)
    if dtype.kind not in "fiu" or dtype.itemsize > 8:
        raise _not_numbers(dtype)
    if any(length < 0 for length in shape):
        raise ValueError(f"the header declares a negative size: shape {shape}")
    needed, held = math.prod(shape) * dtype.itemsize, size - file.tell()
    if needed > held:
        raise ValueError(f"the file is cut short: shape {shape} of {dtype} needs {needed:,} bytes, it has {held:,}")
    return shape, by_columns, dtype


def _not_numbers(dtype: object) -> ValueError:
    return ValueError(f"the array must hold real numbers of at most 64 bits, got {dtype}")


def _read_bytes(file: IO[bytes], count: int) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise OSError(f"the file ends {count - len(data):,} bytes too early")
    return data


def _to_tensor(array: NDArray[Any]) -> Tensor:
    """Copy to memory that torch may write to, in the byte order of this machine."""
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
