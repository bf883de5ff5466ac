"""Whole models as a folder of two files, ``model.safetensors`` and ``config.json``: no pickle, so loading runs no code
from it.

The tensors are whole, whatever number of ranks wrote them, and a rank that reads takes only its own rows.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, fields
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from phantom_parallel.families.registry import family_names, get_family
from phantom_parallel.nn.sharded import full_tensor

FORMAT = "phantom-parallel"
VERSION = 1
WEIGHTS, CONFIG = "model.safetensors", "config.json"


def save_model(model: Any, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a model to a new folder. Every rank of its mesh calls this, of one data-parallel copy; rank 0 writes.

    The folder appears whole or not at all. One that exists is an error unless ``overwrite``, and is then replaced only
    once the new one is complete.
    """
    path = Path(path)
    mesh = model.mesh
    writer = mesh is None or mesh.get_local_rank() == 0
    error = _attempt(lambda: _check_target(path, overwrite)) if writer else None
    _raise_together(error, mesh)
    tensors = {}
    for name, parameter in model.state_dict().items():
        tensor = full_tensor(parameter)  # one at a time: a collective on a mesh
        if writer:
            tensors[name] = tensor.cpu().contiguous()
    error = _attempt(lambda: _write(tensors, model.config, path)) if writer else None
    _raise_together(error, mesh)


def load_model(
    path: str | os.PathLike[str],
    *,
    mesh: DeviceMesh | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Read a model, on one process or cut over a mesh whose size divides its blocks. ``dtype`` converts; by default it
    is the file's.
    """
    path = Path(path)
    config, make = _read_config(path / CONFIG)
    try:
        with safe_open(path / WEIGHTS, framework="pt") as file:
            return _fill(partial(make, config), file, path / WEIGHTS, mesh, device, dtype)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path / WEIGHTS} is not a readable safetensors file: {error}") from None


def _fill(
    make: Callable[..., Any],
    file: Any,
    path: Path,
    mesh: DeviceMesh | None,
    device: Any,
    dtype: torch.dtype | None,
) -> Any:
    names = set(file.keys())
    shapes = {name: list(p.shape) for name, p in make(device="meta").state_dict().items()}
    if names != shapes.keys():
        missing, extra = sorted(shapes.keys() - names), sorted(names - shapes.keys())
        raise ValueError(
            f"{path} does not hold the model that {CONFIG} describes: "
            f"missing {missing or 'nothing'}, unexpected {extra or 'nothing'}"
        )
    for name, shape in shapes.items():
        if (found := list(file.get_slice(name).get_shape())) != shape:
            raise ValueError(f"{path}: {name} has shape {found}, the model that {CONFIG} describes has {shape}")
    smallest = min(shapes, key=lambda name: prod(shapes[name]))  # one is enough to see what type they are
    model = make(mesh=mesh, device="meta", dtype=dtype or file.get_tensor(smallest).dtype)
    model.to_empty(device=device or (mesh.device_type if mesh is not None else torch.get_default_device()))
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            part: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            part.copy_(file.get_slice(name)[own_part(parameter)])
    return model


def own_part(parameter: Tensor) -> tuple[slice, ...]:
    """Where this rank's part lies in the whole tensor: only that is read."""
    if not isinstance(parameter, DTensor):
        return tuple(slice(None) for _ in parameter.shape)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(first, first + length) for first, length in zip(offset, shape, strict=True))


def read_description(path: Path, what: str, kind: str, version: int) -> dict[str, Any]:
    """The JSON object that stands beside tensors, if it is one of ours and of a version that we read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a readable {what} description: {error}") from None
    if not isinstance(found, dict) or found.get("format") != kind:
        raise ValueError(f'{path} is not a Phantom Parallel {what}: expected "format": "{kind}"')
    if found.get("version") != version:
        raise ValueError(f"{path} has version {found.get('version')!r}, this release reads {version}")
    return found


def family_of(path: Path) -> str:
    """Name of the family of the model in the folder ``path``."""
    return _read_family(path / CONFIG)[0]


def _read_family(path: Path) -> tuple[str, Any]:
    found = read_description(path, "model", FORMAT, VERSION)
    name = next((name for name in family_names() if name in found), None)
    if name is None:
        raise ValueError(f"{path}: expected settings of one of {', '.join(family_names())}, got {sorted(found)}")
    return name, found[name]


def _read_config(path: Path) -> tuple[Any, Callable[..., Any]]:
    name, settings = _read_family(path)
    made_of, make = get_family(name).model_config(), get_family(name).model()
    known = {field.name for field in fields(made_of)}
    if not isinstance(settings, dict):
        raise ValueError(f'{path}: expected an object "{name}" with {", ".join(sorted(known))}, got {settings!r}')
    renamed = getattr(made_of, "renamed", {})
    settings = {renamed.get(name, name): value for name, value in settings.items()}
    if unknown := settings.keys() - known:
        raise ValueError(f"{path}: unknown settings {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))}")
    try:
        return made_of(**settings), make
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _check_target(path: Path, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists: choose another folder or pass overwrite=True")
    path.parent.mkdir(parents=True, exist_ok=True)


def _write(tensors: dict[str, Tensor], config: Any, path: Path) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        new = scratch / "new"
        new.mkdir()
        save_file(tensors, new / WEIGHTS, metadata={"format": "pt"})
        about = {"format": FORMAT, "version": VERSION, config.family: asdict(config)}
        (new / CONFIG).write_text(json.dumps(about, indent=2) + "\n")
        if not path.exists():
            os.rename(new, path)
            return
        old = scratch / "old"
        os.rename(path, old)
        try:
            os.rename(new, path)
        except OSError:
            os.rename(old, path)
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _attempt(work: Any) -> Exception | None:
    try:
        work()
    except Exception as error:  # told to the other ranks, then raised on all
        return error
    return None


def _raise_together(error: Exception | None, mesh: DeviceMesh | None) -> None:
    """Raise rank 0's error on every rank: the others must not wait for a file that will not come."""
    told = [error]
    if mesh is not None and mesh.size() > 1:
        dist.broadcast_object_list(told, group=mesh.get_group(), group_src=0)
    if told[0] is not None:
        raise told[0]
