"""The tensors of a module: those that can be saved, which rank saves a tensor that several hold, and filling them.

A DTensor knows its parts. Any other tensor is a rank's own: where several ranks have one of the same name, it is saved
once, so it must be the same on all of them.
"""

import hashlib
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phantom_parallel.checkpoint.parts import Group, Part, Parts, rank_in
from phantom_parallel.distributed.objects import all_gather_objects

_RESERVED = "__metadata__"  # in the header of a safetensors file
_ROUNDING = 1e-2  # of a tensor's largest value: copies that differ by less have drifted by rounding


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """What ``state_dict`` has, detached.

    Raises:
        ValueError: If it has something that cannot be saved.
    """
    tensors = model.state_dict()
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is a {type(value).__name__}: only tensors can be saved")
        if name == _RESERVED:
            raise ValueError(f"a tensor cannot be saved by the name {name}, which safetensors uses itself: rename it")
        if isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements):
            raise ValueError(f"{name} is a DTensor of partial sums, {value.placements}: redistribute it before saving")
    return {name: value.detach() for name, value in tensors.items()}


def parts_to_save(tensors: Mapping[str, Tensor], group: Group) -> Parts:
    """The parts that this rank writes: its own of DTensors, and other tensors if it is the first rank that has them.
    Every rank of ``group`` calls this.

    Raises:
        ValueError: On every rank, if a tensor that is no DTensor differs between ranks.
    """
    plain = [name for name, tensor in tensors.items() if not isinstance(tensor, DTensor)]
    holders: dict[str, list[int]] = {}
    for rank, names in enumerate(all_gather_objects(plain, group)):
        for name in names:
            holders.setdefault(name, []).append(rank)
    shared = {name: ranks for name, ranks in holders.items() if len(ranks) > 1}
    _check_copies({name: tensors[name] for name in shared if name in tensors}, group)
    return {
        name: Part.of(tensor)
        for name, tensor in tensors.items()
        if name not in holders or holders[name][0] == rank_in(group)
    }


def _check_copies(copies: Mapping[str, Tensor], group: Group) -> None:
    """Raise on every rank if ranks have different values of a tensor; warn if they differ by rounding."""
    digests = all_gather_objects({name: _digest(tensor) for name, tensor in copies.items()}, group)
    known = dict.fromkeys(name for one in digests for name in one)
    different = [name for name in known if len({one[name] for one in digests if name in one}) > 1]
    if not different:
        return
    values = all_gather_objects({name: copies[name].cpu() for name in different if name in copies}, group)
    for name in different:
        held = {rank: one[name] for rank, one in enumerate(values) if name in one}
        first, *others = held
        rank = max(others, key=lambda other: _distance(held[first], held[other]))
        distance, largest = _distance(held[first], held[rank]), float(held[first].abs().max())
        about = f"{name} is no DTensor, and differs between ranks {first} and {rank} by up to {distance:.3g}"
        if not distance <= _ROUNDING * largest:
            raise ValueError(
                f"{about}: it would be saved once, as rank {first} has it. Shard it over the mesh, give it the same "
                "gradients on all ranks, or save what each rank has of it by other means"
            )
        warnings.warn(f"{about}, as by rounding: it is saved as rank {first} has it", UserWarning, stacklevel=4)


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(data.data).hexdigest()}"


def _distance(one: Tensor, other: Tensor) -> float:
    """The largest difference of two tensors; infinite if their shapes differ or a difference is not a number."""
    if one.shape != other.shape:
        return float("inf")
    found = float((one.double() - other.double()).abs().max())
    return found if found == found else float("inf")


def load_copies(model: nn.Module, filled: Mapping[str, Tensor]) -> None:
    """Give a module what was read into tensors of its ``state_dict`` that are copies, and not its own memory.

    Raises:
        ValueError: If the module does not take them.
    """
    own = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    copies = {name: tensor for name, tensor in filled.items() if tensor.numel() and _storage(tensor) not in own}
    if not copies:
        return
    model.load_state_dict(copies, strict=False)
    taken = model.state_dict()
    for name, expected in copies.items():
        found, wanted = (_local(tensor).double() for tensor in (taken[name], expected))
        if not torch.allclose(found, wanted, rtol=_ROUNDING, atol=0.0, equal_nan=True):
            raise ValueError(
                f"{name} cannot be loaded: state_dict() of the module has a copy of it, which load_state_dict() does "
                "not take"
            )


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _storage(tensor: Tensor) -> int:
    return _local(tensor).untyped_storage()._cdata
