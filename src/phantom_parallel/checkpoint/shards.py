"""Folders of safetensors files that every rank of a process group writes and reads its own part of.

A rank writes one file, in the layout of ``torch.distributed.checkpoint``'s Hugging Face storage: its header has the
offset of each part in the whole tensor. ``HuggingFaceStorageReader`` takes from such files what a rank needs, whatever
number of ranks wrote them. ``dcp.save`` is not used: it exchanges pickled plans, and nothing is unpickled here.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from phantom_parallel.distributed.objects import all_gather_objects, broadcast_from_rank_zero, on_every_rank
from phantom_parallel.utils.files import read_json, replace_folder, scratch_folder, write_json

Group = dist.ProcessGroup | None  # None: this process alone
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"  # as Hugging Face names them
MAX_SHARD_SIZE = 5 << 30  # bytes of a file of whole tensors
_TIMEOUT = timedelta(hours=2)  # for the slowest rank's disk; a rank that dies ends the wait at once
_storage_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


@dataclass(frozen=True)
class Part:
    """This rank's part of a tensor: its values, and where they lie in the whole."""

    values: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]  # of the whole

    @classmethod
    def of(cls, tensor: Tensor) -> "Part":
        """The part of a DTensor that this rank holds; any other tensor is its own whole."""
        return cls.like(tensor, tensor.to_local() if isinstance(tensor, DTensor) else tensor)

    @classmethod
    def like(cls, tensor: Tensor, values: Tensor) -> "Part":
        """``values`` in the place of what this rank holds of ``tensor``."""
        return cls(values.detach(), tuple(where.start for where in own_part(tensor)), tuple(tensor.shape))

    @property
    def absent(self) -> bool:
        """Whether this rank holds nothing of a tensor that others hold."""
        return self.values.numel() == 0 and 0 not in self.shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:  # which torch's planner asks for
        return [ChunkStorageMetadata(torch.Size(self.offsets), self.values.size())]


Parts = dict[str, Part]


def own_part(tensor: Tensor) -> tuple[slice, ...]:
    """Where this rank's part lies in the whole tensor."""
    shape, offsets = tuple(tensor.shape), (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        shape, offsets = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(first, first + length) for first, length in zip(offsets, shape, strict=True))


def group_of(tensors: Iterable[Tensor]) -> Group:
    """The process group of all ranks that hold parts of ``tensors``; None if this process holds them whole."""
    meshes = {tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}
    mesh = max(meshes, key=lambda mesh: mesh.size(), default=None)
    if mesh is None:
        return None
    ranks = set(mesh.mesh.flatten().tolist())
    if any(not ranks.issuperset(other.mesh.flatten().tolist()) for other in meshes):  # as of mesh["tp"] and mesh["dp"]
        mesh = mesh._get_root_mesh()
    if mesh.size() == 1:
        return None
    if mesh.ndim == 1:
        return mesh.get_group()
    return dist.group.WORLD if mesh.size() == dist.get_world_size() else mesh._flatten().get_group()


def storage_group(group: Group) -> Group:
    """A gloo group of the same ranks, made once, whose collectives may wait for disks. Every rank calls this.

    A thread may use it while the main thread trains, and it needs no accelerator.
    """
    if group is None:
        return None
    if group not in _storage_groups:
        ranks = dist.get_process_group_ranks(group)
        part = len(ranks) < dist.get_world_size()
        _storage_groups[group] = dist.new_group(ranks, _TIMEOUT, backend="gloo", use_local_synchronization=part)
    return _storage_groups[group]


def rank_in(group: Group) -> int:
    """This process's rank in ``group``."""
    return 0 if group is None else dist.get_rank(group)


def save_parts(parts: Parts, path: Path, group: Group, *, prefix: str, finish: Callable[[Path], None]) -> None:
    """Write the parts of all ranks to a folder that takes the place of ``path`` once it is complete.

    Every rank of ``group`` calls this. What several ranks hold is written by one of them. Names of files begin with
    ``prefix``; ``finish`` is called on rank 0 with the folder, once all files are there.

    Raises:
        OSError: On every rank, if one of them could not write or ``finish`` raised. It names the folder and the rank.
    """
    own = _assigned(parts, group)
    number, count = rank_in(group) + 1, 1 if group is None else dist.get_world_size(group)
    file = f"{prefix}-{number:05d}-of-{count:05d}.safetensors"

    def write() -> None:
        if not scratch.is_dir():
            raise FileNotFoundError(f"{path.parent} is not the folder of rank 0: all ranks need a shared file system")
        offsets = {name: {"saved_offsets": list(part.offsets)} for name, part in own.items()}
        tensors = {name: part.values for name, part in own.items()}
        header = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
        if own:
            write_file(scratch / file, tensors, header)

    def complete() -> None:
        if rank_in(group) == 0:
            finish(scratch)
            replace_folder(scratch, path)

    def naming(work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            where = f" on rank {dist.get_rank()}" if group else ""
            raise OSError(f"{path} cannot be written: {error.strerror or error}{where}") from None

    with ExitStack() as stack:
        make = lambda: stack.enter_context(scratch_folder(path))  # noqa: E731
        scratch = make() if group is None else broadcast_from_rank_zero(make, group)
        on_every_rank(lambda: naming(write), group)
        on_every_rank(lambda: naming(complete), group)


def _assigned(parts: Parts, group: Group) -> Parts:
    """The parts that this rank writes. Those of several ranks are shared out among them."""
    present = {name: part for name, part in parts.items() if not part.absent}
    held = all_gather_objects([[name, list(part.offsets)] for name, part in present.items()], group)
    holders: dict[tuple[Any, ...], list[int]] = {}
    for rank, keys in enumerate(held):
        for name, offsets in keys:
            holders.setdefault((name, *offsets), []).append(rank)
    writers = {key: ranks[index % len(ranks)] for index, (key, ranks) in enumerate(sorted(holders.items()))}
    return {name: part for name, part in present.items() if writers[(name, *part.offsets)] == rank_in(group)}


def write_tensors(
    folder: Path, outline: Mapping[str, Tensor], load: Callable[[str], Tensor], limit: int = MAX_SHARD_SIZE
) -> None:
    """Write whole tensors to files of at most ``limit`` bytes, of which one at a time is in memory, and an index of
    them as Hugging Face has it if there are several.

    ``outline`` has the shape and dtype of each tensor, and may be on the meta device; ``load`` returns a tensor.
    """
    plan: list[list[str]] = [[]]
    for name, tensor in outline.items():
        if plan[-1] and sum(outline[other].nbytes for other in plan[-1]) + tensor.nbytes > limit:
            plan.append([])
        plan[-1].append(name)
    files = [f"model-{index:05d}-of-{len(plan):05d}.safetensors" for index in range(1, len(plan) + 1)]
    files = [WEIGHTS] if len(plan) == 1 else files
    for file, chosen in zip(files, plan, strict=True):
        write_file(folder / file, {name: load(name) for name in chosen}, {"format": "pt"})
    if len(plan) > 1:
        where = {name: file for file, chosen in zip(files, plan, strict=True) for name in chosen}
        total = sum(tensor.nbytes for tensor in outline.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def write_file(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file and flush it to the disk."""
    ready: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        values = tensor.detach().cpu().contiguous()
        # Tensors that share memory, such as tied weights, have to be copied for safetensors.
        ready[name] = values.clone() if values.untyped_storage().data_ptr() in seen else values
        seen.add(ready[name].untyped_storage().data_ptr())
    try:
        save_file(ready, path, metadata)
    except SafetensorError as error:
        if (code := re.search(r"os error (\d+)", str(error))) is None:
            raise ValueError(f"{path} cannot be written: {error}") from None
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from None
    with open(path, "rb") as file:
        os.fsync(file.fileno())


class StoredTensors:
    """The tensors of a folder, whatever number of ranks wrote them. The headers are read when it is opened: ``outline``
    has the tensors on the meta device. ValueError if a file is missing or not readable.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = HuggingFaceStorageReader(str(folder))
        try:
            self._metadata = self._reader.read_metadata()
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder} has a file that is not readable as safetensors: {error}") from None
        stored: dict[str, Any] = self._metadata.state_dict_metadata
        for name, tensor in stored.items():
            if sum(prod(chunk.sizes) for chunk in tensor.chunks) != prod(tensor.size):
                raise ValueError(f"{folder} does not have all of {name}: a file is missing")
        self.outline = {
            name: torch.empty(tensor.size, dtype=tensor.properties.dtype, device="meta")
            for name, tensor in stored.items()
        }

    @torch.no_grad()
    def read(self, parts: Parts) -> None:
        """Fill ``parts`` with what the files have in their place. Not collective."""
        planner = _PartsPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({}, self._metadata)
        planner.state_dict = {name: part for name, part in parts.items() if not part.absent}
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        try:
            self._reader.read_data(planner.create_local_plan(), planner)
        except SafetensorError as error:
            raise ValueError(f"{self.folder} has a file that is not readable as safetensors: {error}") from None

    def load(self, name: str) -> Tensor:
        """The whole tensor of that name."""
        whole = torch.empty_like(self.outline[name], device="cpu")
        self.read({name: Part.of(whole)})
        return whole

    def check(self, expected: dict[str, tuple[int, ...]], owner: str) -> None:
        """Raise ValueError unless the tensors have the names and shapes that ``owner`` expects."""
        if self.outline.keys() != expected.keys():
            missing = sorted(expected.keys() - self.outline.keys())[:3]
            extra = sorted(self.outline.keys() - expected.keys())[:3]
            raise ValueError(f"{self.folder} does not hold {owner}: missing {missing}, unexpected {extra}")
        for name, shape in expected.items():
            if (stored := self.outline[name].shape) != shape:
                raise ValueError(f"{self.folder}: {name} has shape {list(stored)}, {owner} has {list(shape)}")


class _PartsPlanner(DefaultLoadPlanner):
    """Plans the reading of `Parts`."""

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        part: Part = self.state_dict[index.fqn]
        return part.values


def read_description(path: Path, subject: str, kind: str, version: int) -> dict[str, Any]:
    """Read the JSON object that describes the tensors beside it; ValueError if it is of another kind or version."""
    description = read_json(path)
    if description.get("format") != kind:
        raise ValueError(f'{path} is not a Phantom Parallel {subject}: expected "format": "{kind}"')
    if description.get("version") != version:
        raise ValueError(f"{path} has version {description.get('version')!r}, this release reads {version}")
    return description
