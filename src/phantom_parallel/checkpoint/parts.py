"""Parts of tensors that ranks hold, and the process groups in which ranks write and read them together."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from phantom_parallel.distributed.objects import broadcast_from_rank_zero, raise_on_all_ranks
from phantom_parallel.utils.files import scratch_folder

T = TypeVar("T")
Group = dist.ProcessGroup | None  # None: this process alone
_CPU = torch.device("cpu")
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
        offsets = tuple(where.start or 0 for where in own_part(tensor))
        return cls(values.detach(), offsets, tuple(tensor.shape))

    @property
    def absent(self) -> bool:
        """Whether this rank holds nothing of a tensor that others hold."""
        return self.values.numel() == 0 and 0 not in self.shape


Parts = dict[str, Part]


def own_part(parameter: Tensor) -> tuple[slice, ...]:
    """Where this rank's part lies in the whole tensor."""
    if not isinstance(parameter, DTensor):
        return tuple(slice(None) for _ in parameter.shape)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(first, first + length) for first, length in zip(offset, shape, strict=True))


def group_of(tensors: Iterable[Tensor]) -> Group:
    """The process group of all ranks that hold parts of ``tensors``; None if this process holds them whole."""
    meshes = {tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}
    mesh = max(meshes, key=lambda mesh: mesh.size(), default=None)
    if mesh is None:
        return None
    ranks = set(mesh.mesh.flatten().tolist())
    if any(
        not ranks.issuperset(other.mesh.flatten().tolist()) for other in meshes
    ):  # such as mesh["tp"] and mesh["dp"]
        mesh = mesh._get_root_mesh()
    if mesh.size() == 1:
        return None
    if mesh.ndim == 1:
        return mesh.get_group()
    return dist.group.WORLD if mesh.size() == dist.get_world_size() else mesh._flatten().get_group()


def meet(group: Group, rule: str) -> None:
    """Wait for all ranks of ``group``, as long as its exchanges may take.

    Raises:
        RuntimeError: If a rank does not come. The message has ``rule`` and, of gloo, the ranks.
    """
    if size_of(group) == 1 or dist.get_backend(group) == "fake":
        return
    try:
        if dist.get_backend(group) == "gloo":
            dist.monitored_barrier(group, wait_all_ranks=True)
        else:
            dist.barrier(group)
    except RuntimeError as error:
        raise RuntimeError(f"{rule}, and not all have: {' '.join(str(error).split())}") from None


def storage_group(group: Group) -> Group:
    """A gloo group of the same ranks, made once, whose exchanges may wait for disks. Every rank calls this.

    It lets a thread exchange while the main thread trains, and it needs no accelerator.
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


def size_of(group: Group) -> int:
    """Number of ranks in ``group``."""
    return 1 if group is None else dist.get_world_size(group)


def on_every_rank(work: Callable[[], T], group: Group) -> T:
    """Run ``work`` on every rank of ``group`` and raise the error of the first rank that has one on all of them.

    Returns:
        What ``work`` returned on this rank.
    """
    result, error = None, None
    try:
        result = work()
    except (ValueError, OSError) as raised:
        error = raised
    raise_on_all_ranks(error, group)
    return cast(T, result)


@contextmanager
def shared_scratch(path: Path, group: Group) -> Iterator[Path]:
    """Yield a new folder beside ``path``, the same on every rank of ``group``, and remove what is left of it after.

    An error of rank 0, which makes the folder, is raised on every rank.
    """
    with ExitStack() as stack:
        if group is None:
            yield stack.enter_context(scratch_folder(path))
        else:
            yield broadcast_from_rank_zero(lambda: stack.enter_context(scratch_folder(path)), _CPU, group)
