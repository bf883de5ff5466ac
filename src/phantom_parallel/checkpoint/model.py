"""Models as a folder of safetensors files and ``config.json``: no pickle, so that loading a model runs no code from it.

The folder has files of whole tensors, ``model.safetensors``, which any reader of safetensors takes. Ranks write their
own parts, and rank 0 makes the whole files from those on the disk. A rank that reads takes its own part only.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from phantom_parallel.checkpoint import shards
from phantom_parallel.checkpoint.shards import MAX_SHARD_SIZE, Group, Part, StoredTensors
from phantom_parallel.distributed.objects import all_gather_objects, barrier, on_every_rank, process_group_of
from phantom_parallel.families.registry import family_names, get_family
from phantom_parallel.utils.files import atomic_folder, check_replaceable, write_json
from phantom_parallel.utils.parsing import check_keys, convert
from phantom_parallel.utils.strategies import WireFormat, get_strategy

FORMAT, VERSION = "phantom-parallel", 1
CONFIG = "config.json"
_ROUNDING = 1e-2  # of a tensor's largest value: copies that differ by less have drifted by rounding


def save_model(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    max_shard_size: int = MAX_SHARD_SIZE,
    complete: Callable[[Path], None] | None = None,
) -> None:
    """Write a model to a new folder. Every rank that holds a part of it calls this, of one data-parallel copy.

    The folder appears whole or not at all. Ranks write their own parts in parallel; rank 0 then holds one file of whole
    tensors at a time. Models by ``fsdp`` and ``pipeline`` are written as the dense model that they are.

    Args:
        model: A model of any family, or any module; its parameters may be DTensors. Only a model of a family can be
            loaded without ``into``.
        path: The folder.
        overwrite: Replace a folder that exists, once the new one is complete.
        max_shard_size: Largest size in bytes of a file of whole tensors. If the model is larger, there are several
            files, with an index as Hugging Face has it.
        complete: Called on rank 0 with the folder before it gets its name, to add files.

    Raises:
        FileExistsError: If ``path`` exists and ``overwrite`` is False, or if it is not the folder of a model.
        OSError: On every rank, if the model cannot be written.
        ValueError: If a tensor cannot be saved, such as one that is no DTensor and differs between ranks.
    """
    path, config, tensors = _target(path), getattr(model, "config", None), _tensors_of(model)
    parts = {name: Part.of(tensor) for name, tensor in tensors.items()}
    group = _storage_group(model, tensors)
    options: dict[str, Any] = {"overwrite": overwrite, "max_shard_size": max_shard_size, "complete": complete}
    if group is None:
        write_model(config, tensors, lambda name: parts[name].values, path, **options)
        return
    on_every_rank(lambda: check_replaceable(path, overwrite, CONFIG) if shards.rank_in(group) == 0 else None, group)
    _check_copies(tensors, group)

    def finish(scratch: Path) -> None:
        parts, stored = list(scratch.iterdir()), StoredTensors(scratch)
        shards.write_tensors(scratch, stored.outline, stored.load, max_shard_size)
        for file in parts:
            file.unlink()
        _complete(scratch, config, complete)

    shards.save_parts(parts, path, group, prefix="shard", finish=finish)


def write_model(
    config: Any,
    outline: Mapping[str, Tensor],
    load: Callable[[str], Tensor],
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    max_shard_size: int = MAX_SHARD_SIZE,
    complete: Callable[[Path], None] | None = None,
) -> None:
    """Write a model from one process that holds one file of tensors at a time: ``load`` returns the tensor of a name,
    and is called once for each of ``outline``. The rest is as for `save_model`.
    """
    path = _target(path)
    check_replaceable(path, overwrite, CONFIG)
    with atomic_folder(path) as scratch:
        shards.write_tensors(scratch, outline, load, max_shard_size)
        _complete(scratch, config, complete)


def _complete(folder: Path, config: Any, complete: Callable[[Path], None] | None) -> None:
    """Add the caller's files and the description, which comes last."""
    if complete is not None:
        complete(folder)
    description: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    if getattr(config, "family", None) in family_names():
        strategy = get_strategy(config.strategy)
        if strategy.shards_rows or strategy.splits_depth:
            config = replace(config, strategy="dense")
        description |= {"family": config.family, "config": asdict(config)}
    write_json(folder / CONFIG, description)


class StoredModel:
    """A model on disk, whose description and shapes of tensors are checked when it is opened. Its ``config`` is None if
    it is to fill the module ``into``.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, strategy: str | None = None, into: nn.Module | None = None
    ) -> None:
        path = Path(path)
        description = shards.read_description(path / CONFIG, "model", FORMAT, VERSION)
        self.config: Any = None
        if into is None:
            self.config = _config(description, path / CONFIG, strategy)
            into = self.build(device="meta")
        elif on_meta := [name for name, tensor in into.state_dict().items() if tensor.is_meta]:
            raise ValueError(f"{on_meta[0]} is on the meta device: materialize it first with to_empty(device=...)")
        self.tensors = StoredTensors(path)
        owner = "the module to fill" if self.config is None else f"the model that {CONFIG} describes"
        expected = _tensors_of(into)
        self.tensors.check({name: tensor.shape for name, tensor in expected.items()}, owner)
        self.dtype = next((tensor.dtype for tensor in self.tensors.outline.values()), torch.get_default_dtype())

    def build(self, **kwargs: Any) -> nn.Module:
        """The model on a mesh, a device and in a dtype, without its values."""
        return get_family(self.config.family).model(self.config, **kwargs)


def load_model(
    path: str | os.PathLike[str],
    *,
    into: nn.Module | None = None,
    mesh: DeviceMesh | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    strategy: str | None = None,
    wire: WireFormat = "full",
) -> Any:
    """Read a model, on one process or sharded over a mesh; every rank of the mesh calls this and reads its own part.

    Args:
        path: The folder.
        into: A module to fill and return, with parameters of the same names and shapes, parallelized or not; required
            for a module that belongs to no family. Values are converted to its dtypes.
        mesh: Ranks that are to share the model; their number must divide its blocks.
        device: Device of the parameters, by default the mesh's or torch's default device.
        dtype: Dtype of the parameters, by default that of the file.
        strategy: Another strategy of the same function and weights, such as ``megatron`` for a model saved as
            ``dense``; by default the one that it was saved with.
        wire: Format in which features are exchanged between the ranks of the mesh, as for `PhantomLinear`.

    Raises:
        ValueError: On every rank, if the folder is not a complete model or does not fit.
    """
    path = Path(path)
    if into is None:
        group = None if mesh is None else shards.storage_group(process_group_of(mesh))
        stored = on_every_rank(lambda: StoredModel(path, strategy=strategy), group)
        where = torch.device(device or (mesh.device_type if mesh is not None else torch.get_default_device()))
        model = stored.build(mesh=mesh, device="meta", dtype=dtype or stored.dtype, wire=wire)
        if where.type == "meta":
            return model
        model.to_empty(device=where)
    else:
        if (mesh, device, dtype, strategy, wire) != (None, None, None, None, "full"):
            raise ValueError("mesh, device, dtype, strategy and wire are those of the module given as into")
        model = into
        group = _storage_group(model, _tensors_of(model))
        stored = on_every_rank(lambda: StoredModel(path, into=model), group)
    tensors = _tensors_of(model)
    parts = {name: Part.of(tensor) for name, tensor in tensors.items()}
    on_every_rank(lambda: stored.tensors.read(parts), group)
    own = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    copies = {name: tensor for name, tensor in tensors.items() if tensor.numel() and _storage(tensor) not in own}
    if copies:  # of what is no parameter or buffer, or is cast by a hook of state_dict
        model.load_state_dict(copies, strict=False)
    return model


def family_of(path: str | os.PathLike[str]) -> str:
    """Name of the family of the model in the folder ``path``."""
    return str(read_config(path).family)


def read_config(path: str | os.PathLike[str]) -> Any:
    """Config of the model in the folder ``path``. Its tensors are not read."""
    file = Path(path) / CONFIG
    return _config(shards.read_description(file, "model", FORMAT, VERSION), file)


def _storage_group(model: nn.Module, tensors: Mapping[str, Tensor]) -> Group:
    """The ranks that hold parts of a model, once all of them are there. Stages of a pipeline hold tensors of their own,
    which do not name the other stages.
    """
    mesh = getattr(model, "mesh", None)
    staged = isinstance(mesh, DeviceMesh) and isinstance(getattr(model, "stages", None), DeviceMesh)
    group = mesh.get_group() if staged else shards.group_of(tensors.values())  # type: ignore[union-attr]
    barrier(group)  # a missing rank is noticed within the timeout of this group, and not within that of storage
    return shards.storage_group(group)


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """What ``state_dict`` has, detached; ValueError if it has something that cannot be saved."""
    tensors = model.state_dict()
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is a {type(value).__name__}: only tensors can be saved")
        if isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements):
            raise ValueError(f"{name} is a DTensor of partial sums, {value.placements}: redistribute it before saving")
    return {name: value.detach() for name, value in tensors.items()}


def _check_copies(tensors: Mapping[str, Tensor], group: Group) -> None:
    """Raise on every rank if a tensor that is no DTensor, which is saved once, differs by more than rounding."""
    plain = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, DTensor) and tensor.numel()}
    shapes = all_gather_objects({name: list(tensor.shape) for name, tensor in plain.items()}, group)
    for name in [name for name in shapes[0] if all(name in each for each in shapes)]:
        if any(each[name] != shapes[0][name] for each in shapes):
            raise ValueError(f"{name} is no DTensor, and its shape differs between ranks: shard it over the mesh")
        values = plain[name].double().cpu().nan_to_num(nan=1e300)  # so that infinities of a mask may be compared
        extremes = torch.stack([values, -values])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
        spread, largest = float(extremes.sum(0).max()), float(extremes.max())
        if spread > _ROUNDING * largest:
            raise ValueError(f"{name} is no DTensor, and differs between ranks by up to {spread:.3g}: shard it")


def _config(description: dict[str, Any], path: Path, strategy: str | None = None) -> Any:
    """The config that the file ``path`` describes, with another strategy if one is given."""
    name, settings = description.get("family"), description.get("config")
    if name not in family_names():
        raise ValueError(f"{path} describes a module of no model family: build the module and pass it as into")
    kind = get_family(name).config
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: expected the settings of a model, got {settings!r}")
    check_keys(settings, [field.name for field in fields(kind)], str(path))
    config = convert(settings, kind, str(path))
    if strategy is None or strategy == config.strategy:
        return config
    if not get_strategy(strategy).same_model or not get_strategy(config.strategy).same_model:
        raise ValueError(f"{path}: a model of the strategy {config.strategy} is no model of {strategy}")
    return replace(config, strategy=strategy)


def _target(path: str | os.PathLike[str]) -> Path:
    """The folder to write to. A link is followed, so that it still leads to the model."""
    path = Path(path).absolute()
    return path.resolve() if path.is_symlink() else path


def _storage(tensor: Tensor) -> int:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()._cdata
