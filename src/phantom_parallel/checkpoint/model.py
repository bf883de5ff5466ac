"""Models as a folder of safetensors files and ``config.json``: no pickle, so that loading a model runs no code from it.

By default the folder has one file of whole tensors, ``model.safetensors``, which any reader of safetensors takes. Ranks
write their own parts, and rank 0 makes the whole file from those on the disk, one tensor at a time. A rank that reads
takes its own part only.
"""

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh

from phantom_parallel.checkpoint.description import described_files, read_description
from phantom_parallel.checkpoint.module_state import load_copies, parts_to_save, tensors_of
from phantom_parallel.checkpoint.parts import (
    Group,
    Part,
    group_of,
    meet,
    on_every_rank,
    rank_in,
    shared_scratch,
    storage_group,
)
from phantom_parallel.checkpoint.shards import read_metadata, read_shards, save_shards, verify
from phantom_parallel.checkpoint.tensor_file import FileDigest, TensorLayout
from phantom_parallel.checkpoint.whole_files import INDEX, WEIGHTS, merge_files, write_tensors
from phantom_parallel.distributed.objects import process_group_of
from phantom_parallel.families.registry import family_names, get_family
from phantom_parallel.utils.files import atomic_folder, check_replaceable, replace_folder, write_json
from phantom_parallel.utils.strategies import get_strategy
from phantom_parallel.utils.wire import WireFormat

__all__ = ["StoredModel", "consolidate_model", "family_of", "load_model", "read_config", "save_model", "write_model"]

FORMAT = "phantom-parallel"
VERSION = 2
CONFIG = "config.json"


def save_model(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    consolidate: bool = True,
    max_shard_size: int | None = None,
    complete: Callable[[Path], None] | None = None,
) -> None:
    """Write a model to a new folder. Every rank that holds a part of it calls this, of one data-parallel copy.

    The folder appears whole or not at all. Ranks write their own parts in parallel, and none holds more than its part
    and one tensor besides. Models by ``fsdp`` and ``pipeline`` are written as the dense model that they are.

    Args:
        model: A model of any family, or any module; its parameters may be DTensors. Only a model of a family can be
            loaded without ``into``.
        path: The folder.
        overwrite: Replace a folder that exists, once the new one is complete.
        consolidate: Make whole tensors from the parts, on rank 0. If False, each rank's file stays as it is, which is
            faster for large models; `consolidate_model` can follow later.
        max_shard_size: Largest size in bytes of a file of whole tensors. If the model is larger, there are several
            files, with an index as Hugging Face has it.
        complete: Called on rank 0 with the folder before it gets its name, to add files.

    Raises:
        FileExistsError: If ``path`` exists and ``overwrite`` is False, or if it is not the folder of a model.
        OSError: On every rank, if the model cannot be written.
        ValueError: If a tensor cannot be saved, such as one that is no DTensor and differs between ranks.
        RuntimeError: If another rank that holds a part of the model does not call this.
    """
    path = _target(path)
    tensors = tensors_of(model)
    group = _storage_group(_group_of(model, tensors), "save_model")
    on_every_rank(lambda: _check_target(path, overwrite, group), group)
    parts = parts_to_save(tensors, group)

    def finish(scratch: Path, files: dict[str, FileDigest]) -> None:
        if complete is not None:
            complete(scratch)
        write_json(scratch / CONFIG, _describe(getattr(model, "config", None), files))
        replace_folder(scratch, path)

    try:
        with shared_scratch(path, group) as scratch:
            if group is None:
                layouts = [TensorLayout(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
                finish(scratch, write_tensors(scratch, layouts, lambda name: parts[name].values, max_shard_size))
            elif consolidate:
                save_shards(
                    parts,
                    scratch,
                    group,
                    prefix="shard",
                    finish=lambda files: finish(scratch, merge_files(scratch, files, scratch, max_shard_size)),
                )
            else:
                save_shards(parts, scratch, group, prefix="shard", finish=lambda files: finish(scratch, files))
    except OSError as error:
        raise OSError(f"the model {path} cannot be written: {error.strerror or error}") from None


def write_model(
    config: Any,
    layouts: Iterable[TensorLayout],
    load: Callable[[str], Tensor],
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    max_shard_size: int | None = None,
    complete: Callable[[Path], None] | None = None,
) -> None:
    """Write a model that no process holds whole: its tensors are made one at a time. One process calls this.

    Args:
        config: The model's config, of a family.
        layouts: Its tensors.
        load: Returns the tensor of a name; called once for each.
        path: As for `save_model`.
        overwrite: As for `save_model`.
        max_shard_size: As for `save_model`.
        complete: As for `save_model`.
    """
    path = _target(path)
    _check_target(path, overwrite, None)
    with atomic_folder(path, overwrite=overwrite) as scratch:
        files = write_tensors(scratch, list(layouts), load, max_shard_size)
        if complete is not None:
            complete(scratch)
        write_json(scratch / CONFIG, _describe(config, files))


class StoredModel:
    """A model on disk, whose tensors are read one at a time. The files are checked when it is opened.

    Attributes:
        path: The folder.
        config: The model's config.
        dtype: Dtype of its tensors.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        found = read_description(self.path / CONFIG, "model", FORMAT, (1, VERSION))
        self._files = _files_of(found, self.path)
        self.config = _config(*_family_settings(found, self.path / CONFIG), self.path / CONFIG)
        self._stored = read_metadata(self.path, self._files)
        described = tensors_of(_maker(found, self.path / CONFIG)(device="meta"))
        _compare(self._stored, described, _place(self.path, self._files), f"the model that {CONFIG} describes")
        if found["version"] > 1:
            verify(self.path, self._files, None)
        self.dtype = next(iter(self._stored.values())).properties.dtype

    def load(self, name: str) -> Tensor:
        """The whole tensor of that name."""
        about = self._stored[name]
        whole = torch.empty(about.size, dtype=about.properties.dtype)
        read_shards({name: Part.of(whole)}, self.path, self._files)
        return whole


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
    """Read a model, on one process or cut over a mesh; every rank of the mesh calls this and reads its own part.

    Args:
        path: The folder.
        into: A module to fill, with parameters of the same names and shapes, parallelized or not; required for a module
            that belongs to no family. Values are converted to its dtypes.
        mesh: Ranks that are to share the model; their number must divide its blocks.
        device: Device of the parameters, by default the mesh's or torch's default device.
        dtype: Dtype of the parameters, by default that of the file.
        strategy: Another strategy of the same function and weights, such as ``megatron`` for a model saved as
            ``dense``; by default the one that it was saved with.
        wire: Format in which features travel between the ranks of the mesh, as for `PhantomLinear`.

    Returns:
        The model; ``into`` if it was given.

    Raises:
        ValueError: On every rank, if the folder is not a complete model, does not fit, or has changed since it was
            written.
        RuntimeError: If another rank that is to hold a part of the model does not call this.
    """
    path = Path(path)
    if into is None:
        group = _storage_group(None if mesh is None else process_group_of(mesh), "load_model")
        found = on_every_rank(lambda: _Stored(path, None, strategy), group)
        where = torch.device(device or (mesh.device_type if mesh is not None else torch.get_default_device()))
        model = found.make(mesh=mesh, device="meta", dtype=dtype or found.dtype, wire=wire)
        if where.type == "meta":
            return model
        model.to_empty(device=where)
    else:
        if (mesh, device, dtype, strategy, wire) != (None, None, None, None, "full"):
            raise ValueError(
                "mesh, device, dtype, strategy and wire are those of the module given as into: leave them out"
            )
        model = into
        group = _storage_group(_group_of(model, tensors_of(model)), "load_model")
        found = on_every_rank(lambda: _Stored(path, model), group)
    tensors = tensors_of(model)
    if found.digests:
        verify(path, found.files, group)
    parts = {name: Part.of(tensor) for name, tensor in tensors.items()}
    on_every_rank(lambda: read_shards(parts, path, found.files), group)
    on_every_rank(lambda: load_copies(model, tensors), group)
    return model


class _Stored:
    """What is to be read from a folder, once its description and the shapes of its tensors were found to fit.

    Args:
        path: The folder.
        into: The module to fill; None for a model of a family.
        strategy: As for `load_model`.
    """

    def __init__(self, path: Path, into: nn.Module | None, strategy: str | None = None) -> None:
        about = read_description(path / CONFIG, "model", FORMAT, (1, VERSION))
        self.files, self.digests = _files_of(about, path), about["version"] > 1
        if into is None:
            self.make = _maker(about, path / CONFIG, strategy)
            into, whose = self.make(device="meta"), f"the model that {CONFIG} describes"
        else:
            whose = "the module to fill"
            if on_meta := [name for name, tensor in into.state_dict().items() if tensor.is_meta]:
                raise ValueError(
                    f"{on_meta[0]} of {whose} is on the meta device: give it memory first, with to_empty(device=...)"
                )
        described = tensors_of(into)
        stored = read_metadata(path, self.files)
        _compare(stored, described, _place(path, self.files), whose)
        self.dtype = next((stored[name].properties.dtype for name in described), None)


def consolidate_model(path: str | os.PathLike[str], *, max_shard_size: int | None = None) -> None:
    """Replace the files of a model that ranks wrote with ``consolidate=False`` by files of whole tensors.

    One process calls this. It holds one tensor at a time.
    """
    path = Path(path).absolute()
    found = read_description(path / CONFIG, "model", FORMAT, (VERSION,))
    files = described_files(found, path / CONFIG)
    verify(path, files, None)
    with atomic_folder(path, overwrite=True) as scratch:
        for file in path.iterdir():
            if file.is_file() and file.name not in {*files, CONFIG, INDEX}:
                shutil.copy2(file, scratch)
        write_json(scratch / CONFIG, found | {"files": merge_files(path, files, scratch, max_shard_size, keep=True)})


def family_of(path: str | os.PathLike[str]) -> str:
    """Name of the family of the model in the folder ``path``."""
    about = Path(path) / CONFIG
    return _family_settings(read_description(about, "model", FORMAT, (1, VERSION)), about)[0]


def read_config(path: str | os.PathLike[str]) -> Any:
    """Config of the model in the folder ``path``. Its tensors are not looked at."""
    about = Path(path) / CONFIG
    return _config(*_family_settings(read_description(about, "model", FORMAT, (1, VERSION)), about), about)


def _storage_group(group: Group, function: str) -> Group:
    """The group of ranks that write or read together, once all of them are there."""
    meet(group, f"every rank that holds a part of the model calls {function}")
    return storage_group(group)


def _group_of(model: nn.Module, tensors: dict[str, Tensor]) -> Group:
    """The ranks that hold parts of a model. Those of a pipeline hold whole tensors, each of some layers."""
    mesh = getattr(model, "mesh", None)
    staged = isinstance(mesh, DeviceMesh) and get_strategy(model.config.strategy).splits_depth  # type: ignore[union-attr]
    return mesh.get_group() if staged else group_of(tensors.values())  # type: ignore[union-attr]


def _describe(config: Any, files: dict[str, FileDigest]) -> dict[str, Any]:
    about: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    if getattr(config, "family", None) in family_names():
        strategy = get_strategy(config.strategy)
        if strategy.shards_rows or strategy.splits_depth:
            config = replace(config, strategy="dense")
        about |= {"family": config.family, "config": asdict(config)}
    return about | {"files": files}


def _files_of(found: dict[str, Any], path: Path) -> dict[str, FileDigest]:
    return {WEIGHTS: {}} if found["version"] == 1 else described_files(found, path / CONFIG)


def _place(path: Path, files: Iterable[str]) -> Path:
    """What errors name: the file if there is one, else the folder."""
    names = list(files)
    return path / names[0] if len(names) == 1 else path


def _compare(stored: dict[str, TensorStorageMetadata], expected: dict[str, Tensor], place: Path, whose: str) -> None:
    if stored.keys() != expected.keys():
        missing, extra = sorted(expected.keys() - stored.keys()), sorted(stored.keys() - expected.keys())
        raise ValueError(
            f"{place} does not hold {whose}: missing {missing[:3] or 'nothing'}, unexpected {extra[:3] or 'nothing'}"
        )
    for name, tensor in expected.items():
        if (found := list(stored[name].size)) != list(tensor.shape):
            raise ValueError(f"{place}: {name} has shape {found}, {whose} has {list(tensor.shape)}")


def _family_settings(found: dict[str, Any], path: Path) -> tuple[str, Any]:
    name = found.get("family") if found["version"] > 1 else next((n for n in family_names() if n in found), None)
    if name is None:
        raise ValueError(
            f"{path} describes a module that belongs to no model family ({', '.join(family_names())}): "
            "build the module and pass it as into"
        )
    try:
        get_family(name)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return name, found.get("config") if found["version"] > 1 else found[name]


def _maker(found: dict[str, Any], path: Path, strategy: str | None = None) -> Callable[..., nn.Module]:
    """What builds the model on a mesh, a device and in a dtype."""
    name, settings = _family_settings(found, path)
    config, model = _config(name, settings, path), get_family(name).model()
    if strategy is not None and strategy != config.strategy:
        if not get_strategy(strategy).same_model or not get_strategy(config.strategy).same_model:
            raise ValueError(f"{path}: a model of the strategy {config.strategy} is no model of {strategy}")
        config = replace(config, strategy=strategy)
    return lambda **kwargs: model(config, **kwargs)


def _config(name: str, settings: Any, path: Path) -> Any:
    """The config of a model of the family ``name``, from its settings in the file ``path``."""
    made_of = get_family(name).model_config()
    known = {field.name for field in fields(made_of)}
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: expected an object with {', '.join(sorted(known))}, got {settings!r}")
    renamed = getattr(made_of, "renamed", {})
    settings = {renamed.get(name, name): value for name, value in settings.items()}
    if hasattr(made_of, "older_defaults"):
        settings = made_of.older_defaults(settings) | settings
    if unknown := settings.keys() - known:
        raise ValueError(f"{path}: unknown settings {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))}")
    try:
        return made_of(**settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _target(path: str | os.PathLike[str]) -> Path:
    """The folder to write to. A link is followed, so that it still leads to the model."""
    path = Path(path).absolute()
    return path.resolve() if path.is_symlink() else path


def _check_target(path: Path, overwrite: bool, group: Group) -> None:
    if rank_in(group) == 0:
        check_replaceable(path, overwrite, CONFIG)
