"""Safetensors files that are written and read one tensor at a time, with digests of their bytes.

A digest is SHA-256 over segments of a fixed size, so that several ranks can check one file together.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

SEGMENT = 64 << 20  # bytes under one digest
_BLOCK = 1 << 20  # bytes that are hashed, or read or written, at once
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

FileDigest = dict[str, Any]  # {"bytes": length of the file, "sha256": [digest of each segment]}


@dataclass(frozen=True)
class TensorLayout:
    """Name, shape and dtype of a tensor in a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in _NAMES:
            supported = ", ".join(map(str, _NAMES))
            raise ValueError(f"{self.name} has dtype {self.dtype}, which cannot be saved; supported are {supported}")

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_tensor_file(
    path: Path, layouts: Iterable[TensorLayout], load: Callable[[str], Tensor], metadata: dict[str, str]
) -> FileDigest:
    """Write a safetensors file of which one tensor at a time is in memory, and flush it to the disk.

    Args:
        path: The file, which must not exist.
        layouts: The tensors of the file.
        load: Called once for each name, in the order of the file. Returns the tensor on any device.
        metadata: Strings for the file's header.

    Returns:
        The digest of the file, computed while it is written.
    """
    ordered = sorted(layouts, key=lambda layout: (-layout.dtype.itemsize, layout.name))  # keeps every tensor aligned
    with open(path, "xb") as file:
        hashed = _HashedFile(file)
        hashed.write(_header(ordered, metadata))
        for layout in ordered:
            values = load(layout.name).detach()
            assert (tuple(values.shape), values.dtype) == (layout.shape, layout.dtype), layout.name
            hashed.write(_bytes_of(values))
            del values
        file.flush()
        os.fsync(file.fileno())
    return hashed.digest()


class TensorFile:
    """A safetensors file, open for reading. Nothing is mapped: what is read is in memory once, and nothing else is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "rb")  # noqa: SIM115 (closed by `close`)
        length = int.from_bytes(self._file.read(8), "little")
        self._header = json.loads(self._file.read(length))
        self._start = 8 + length

    def close(self) -> None:
        self._file.close()

    def read_rows(self, name: str, first: int, rows: int) -> Iterator[tuple[int, Tensor]]:
        """Read ``rows`` rows of a tensor, beginning at row ``first``, a block of them at a time; a scalar as it is.

        Yields:
            How many rows came before, and the next ones, in memory that is used again for those after them.
        """
        about = self._header[name]
        shape, dtype = about["shape"], _DTYPES[about["dtype"]]
        row_bytes = prod(shape[1:]) * dtype.itemsize
        self._file.seek(self._start + about["data_offsets"][0] + first * row_bytes)
        at_once = max(1, _BLOCK // max(1, row_bytes))
        block = torch.empty([min(at_once, rows), *shape[1:]] if shape else [], dtype=dtype)
        for done in range(0, rows, at_once):
            values = block[: rows - done] if shape else block
            target = _bytes_of(values)
            if self._file.readinto(target) != len(target):
                raise OSError(f"{self.path} ends within the tensor {name}")
            yield done, values


def wrong_bytes(folder: Path, files: dict[str, FileDigest], rank: int = 0, size: int = 1) -> str | None:
    """Compare this rank's share of the segments of some files with their digests.

    Returns:
        A sentence that names the first file that differs; None if all agree.
    """
    for name, digest in files.items():
        path, expected = folder / name, digest["bytes"]
        if (found := path.stat().st_size) != expected:
            return f"{path} has {found} bytes, {expected} were written"
    segments = [(name, index) for name, digest in files.items() for index in range(len(digest["sha256"]))][rank::size]

    def differs(segment: tuple[str, int]) -> bool:
        name, index = segment
        return _hash_segment(folder / name, index) != files[name]["sha256"][index]

    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        for (name, index), wrong in zip(segments, pool.map(differs, segments), strict=True):
            if wrong:
                last = min((index + 1) * SEGMENT, files[name]["bytes"]) - 1
                return f"{folder / name} has changed since it was written (bytes {index * SEGMENT} to {last})"
    return None


def is_digest(value: object) -> bool:
    """Whether ``value``, read from JSON, has the form of a `FileDigest`."""
    if not isinstance(value, dict) or not isinstance(value.get("bytes"), int):
        return False
    sums = value.get("sha256")
    count = -(-value["bytes"] // SEGMENT)
    return isinstance(sums, list) and len(sums) == count and all(isinstance(one, str) for one in sums)


class _HashedFile:
    """A file open for writing that hashes what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._length = file, 0
        self._sums: list[Any] = []

    def write(self, data: memoryview) -> None:
        for block in self._blocks(data):
            if self._length % SEGMENT == 0:
                self._sums.append(hashlib.sha256())
            self._sums[-1].update(block)
            self._file.write(block)
            self._length += len(block)

    def _blocks(self, data: memoryview) -> Iterator[memoryview]:
        while len(data):
            size = min(_BLOCK, SEGMENT - self._length % SEGMENT)
            yield data[:size]
            data = data[size:]

    def digest(self) -> FileDigest:
        return {"bytes": self._length, "sha256": [one.hexdigest() for one in self._sums]}


def _header(layouts: list[TensorLayout], metadata: dict[str, str]) -> memoryview:
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for layout in layouts:
        ends = [offset, offset := offset + layout.bytes]
        header[layout.name] = {"dtype": _NAMES[layout.dtype], "shape": list(layout.shape), "data_offsets": ends}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return memoryview(len(text).to_bytes(8, "little") + text)


def _bytes_of(values: Tensor) -> memoryview:
    """The bytes of a tensor: its own memory where it is contiguous and on the CPU."""
    flat = values.cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if len(flat) else memoryview(b"")


def _hash_segment(path: Path, index: int) -> str:
    found, left = hashlib.sha256(), SEGMENT
    buffer = memoryview(bytearray(_BLOCK))
    with open(path, "rb") as file:
        file.seek(index * SEGMENT)
        while left and (count := file.readinto(buffer[: min(left, _BLOCK)])):
            found.update(buffer[:count])
            left -= count
    return found.hexdigest()
