"""Folders of tensors that every rank of a process group writes and reads its own part of.

`torch.distributed.checkpoint` plans who writes what: a part that several ranks hold is written by one of them, and a
rank that reads takes what it needs from any files. The files are its Hugging Face layout, safetensors with the offset
of each part in the header, which ``HuggingFaceStorageReader`` reads as well. They are written one tensor at a time: a
rank holds its own part and one tensor besides. Nothing is pickled to disk; plans travel between our own ranks.
"""

import json
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from phantom_parallel.checkpoint.parts import Group, Part, Parts, on_every_rank, rank_in, size_of
from phantom_parallel.checkpoint.tensor_file import (
    FileDigest,
    TensorFile,
    TensorLayout,
    write_tensor_file,
    wrong_bytes,
)


def save_shards(
    parts: Parts, folder: Path, group: Group, *, prefix: str, finish: Callable[[dict[str, FileDigest]], None]
) -> None:
    """Write every rank's parts to an existing folder, one file a rank; every rank of ``group`` calls this.

    Args:
        parts: This rank's parts by name.
        folder: The same folder for every rank.
        group: The ranks that write.
        prefix: Beginning of the names of the files.
        finish: Called on rank 0 once the files of all ranks are on the disk, with their digests by name.

    Raises:
        OSError: On every rank, if one of them could not write or ``finish`` raised. It names the rank.
    """
    writer, planner = _Writer(folder, prefix, finish, size_of(group)), _Saves(parts)
    if group is None:  # as dcp.save, which warns of a process without a group
        plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
        writer.finish(metadata, [writer.write_data(writer.prepare_global_plan(plans)[0], planner).wait()])
        return
    try:
        save({}, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:
        raise _first_failure(error, group) from None


def read_metadata(folder: Path, files: Iterable[str]) -> dict[str, TensorStorageMetadata]:
    """Shapes, dtypes and chunks of the tensors in some files of ``folder``, by name.

    Raises:
        ValueError: If a file is not readable.
    """
    found: dict[str, Any] = _Reader(folder, files).read_metadata().state_dict_metadata
    for name, about in found.items():
        if sum(prod(chunk.sizes) for chunk in about.chunks) != prod(about.size):
            raise ValueError(f"{folder} does not have all of {name}: a file is missing")
    return found


def read_shards(parts: Parts, folder: Path, files: Iterable[str]) -> None:
    """Fill ``parts`` with what the files have in their place, whatever number of ranks wrote them. Not collective."""
    with _Reader(folder, files) as reader:
        reader.fill(parts, reader.read_metadata())


def verify(folder: Path, files: dict[str, FileDigest], group: Group, otherwise: str = "use another folder") -> None:
    """Compare the bytes of some files with their digests, each rank its share; every rank of ``group`` calls this.

    Args:
        folder: Where the files are.
        files: Their digests by name.
        group: The ranks that compare.
        otherwise: What to do without a copy of a file that has changed.

    Raises:
        ValueError: On every rank, if a file has changed.
    """

    def check() -> None:
        if (wrong := wrong_bytes(folder, files, rank_in(group), size_of(group))) is not None:
            raise ValueError(f"{wrong}: restore the file from a copy, or {otherwise}")

    on_every_rank(check, group)


def merge_shards(folder: Path, shards: Iterable[str], target: Path, names: Iterable[str]) -> FileDigest:
    """Write whole tensors to the file ``target`` from shards in ``folder``, one tensor at a time. Not collective."""
    with _Reader(folder, shards) as reader:
        metadata = reader.read_metadata()
        found: dict[str, Any] = metadata.state_dict_metadata
        layouts = [TensorLayout(name, tuple(found[name].size), found[name].properties.dtype) for name in names]

        def load(name: str) -> Tensor:
            whole = torch.empty(found[name].size, dtype=found[name].properties.dtype)
            reader.fill({name: Part.of(whole)}, metadata)
            return whole

        return write_tensor_file(target, layouts, load, {"format": "pt"})


class _Saves(DefaultSavePlanner):
    """Plans the writing of `Parts`. The default planner removes what several ranks hold from all but one of them."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(name, part) for name, part in self._parts.items() if not part.absent])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._parts[write_item.index.fqn].values


class _Loads(DefaultLoadPlanner):
    """Plans the reading of `Parts`."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored: dict[str, Any] = self.metadata.state_dict_metadata
        items: list[ReadItem] = []
        for name, part in self._parts.items():
            if not part.absent:
                items += create_read_items_for_chunk_list(name, stored[name], [_chunk(part)])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self._parts[read_item.dest_index.fqn].values
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing is left to do: `resolve_tensor` gives the part's own memory."""


class _Writer(HuggingFaceStorageWriter):
    """Writes a rank's file one tensor at a time; torch's own makes the bytes of the whole file first."""

    def __init__(self, folder: Path, prefix: str, finish: Callable[[dict[str, FileDigest]], None], ranks: int) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._folder, self._prefix, self._finish, self._ranks = folder, prefix, finish, ranks

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not self._folder.is_dir():
            raise FileNotFoundError(
                f"{self._folder.parent} is not the folder that rank 0 writes to: all ranks need a shared file system"
            )
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        items = {item.index.fqn: item for item in plan.items}
        future: Future[list[WriteResult]] = Future()
        if not items:
            future.set_result([])
            return future
        name = f"{self._prefix}-{plan.storage_data['shard_index']:05d}-of-{self._ranks:05d}.safetensors"
        offsets = {fqn: {"saved_offsets": list(_data(item).chunk.offsets)} for fqn, item in items.items()}
        digest = write_tensor_file(
            self._folder / name,
            [TensorLayout(fqn, tuple(_data(item).chunk.sizes), _dtype(item)) for fqn, item in items.items()],
            lambda fqn: planner.resolve_data(items[fqn]),  # type: ignore[arg-type, return-value]
            {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)},
        )
        future.set_result([WriteResult(plan.items[0].index, digest["bytes"], (name, digest))])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self._finish(dict(result.storage_data for written in results for result in written))


class _Reader(HuggingFaceStorageReader):
    """Reads the given files of a folder, without mapping them into memory."""

    def __init__(self, folder: Path, files: Iterable[str]) -> None:
        super().__init__(str(folder))
        self._folder = folder
        self.fs = _Listed([str(folder / name) for name in files])
        self._opened: dict[str, TensorFile] = {}

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._opened.values():
            file.close()

    @torch.no_grad()
    def fill(self, parts: Parts, metadata: Metadata) -> None:
        """Read ``parts`` as ``dcp.load`` would on one rank: a reader needs nothing of the other ranks."""
        planner = _Loads(parts)
        planner.set_up_planner({}, metadata)
        self.set_up_storage_reader(metadata, is_coordinator=True)
        self.read_data(planner.create_local_plan(), planner)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        for path in self.fs.ls(self._folder):
            if not Path(path).is_file():
                raise ValueError(f"{path} is not a readable safetensors file: there is no such file")
        try:
            return super().read_metadata()
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self._unreadable()} is not a readable safetensors file: {error}") from None

    def _unreadable(self) -> Path | str:
        """The file that cannot be read; torch's error does not name it."""
        from safetensors import safe_open

        for path in self.fs.ls(self._folder):
            try:
                with safe_open(path, framework="pt"):
                    pass
            except (SafetensorError, OSError):
                return path
        return self._folder

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        per_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            per_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for path, items in per_file.items():
            if path not in self._opened:
                self._opened[path] = TensorFile(Path(path))
            for item in items:
                _read_item(self._opened[path], item, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future


class _Listed(FileSystem):
    """A file system in which a folder has only the given files."""

    def __init__(self, files: list[str]) -> None:
        self._files = files

    def ls(self, path: Any) -> list[str]:
        return self._files


def _read_item(file: TensorFile, item: ReadItem, planner: LoadPlanner) -> None:
    target = planner.resolve_tensor(item)
    starts, lengths = item.storage_offsets, item.lengths
    rows = (starts[0], lengths[0]) if lengths else (0, 1)
    for done, values in file.read_rows(item.storage_index.fqn, *rows):
        for dim in range(1, len(lengths)):
            values = values.narrow(dim, starts[dim], lengths[dim])
        (target.narrow(0, done, len(values)) if lengths else target).copy_(values)
    planner.commit_tensor(item, target)


def _write_item(name: str, part: Part) -> WriteItem:
    return WriteItem(
        MetadataIndex(name, torch.Size(part.offsets)),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            _chunk(part), TensorProperties.create_from_tensor(part.values), torch.Size(part.shape)
        ),
    )


def _chunk(part: Part) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(part.offsets), part.values.size())


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None
    return item.tensor_data


def _dtype(item: WriteItem) -> torch.dtype:
    return _data(item).properties.dtype


def _first_failure(error: CheckpointException, group: dist.ProcessGroup) -> BaseException:
    """What went wrong on the first rank that failed, instead of torch's BaseException with a traceback for a text."""
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    if not isinstance(cause, OSError):
        return cause
    return OSError(f"{cause.strerror or cause} on rank {dist.get_global_rank(group, rank)}")
