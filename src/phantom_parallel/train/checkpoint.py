"""Checkpoints of a training: a folder ``step-000100`` with ``state.safetensors`` and ``checkpoint.json``.

Tensors are whole and named by their parameter, model and optimizer alike, whatever number of ranks wrote them, and a
rank that reads takes only its own rows. Nothing is pickled: reading a stranger's checkpoint runs none of their code.
"""

import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phantom_parallel.checkpoint.model import own_part, read_description
from phantom_parallel.families.registry import get_family
from phantom_parallel.nn.sharded import full_tensor
from phantom_parallel.train.config import TrainConfig
from phantom_parallel.train.optimizer import PartsOptimizer, state_keys

FORMAT, VERSION = "phantom-parallel-checkpoint", 1
STATE, ABOUT = "state.safetensors", "checkpoint.json"


@dataclass(frozen=True)
class Progress:
    """How far a training has come: steps done, seconds that they took, and on what data where the config does not say
    it all.
    """

    step: int
    seconds: float
    data: str | None = None


def found_in(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    return sorted(
        (path for path in folder.glob("step-*") if path.name[5:].isdigit() and path.is_dir()),
        key=lambda path: int(path.name[5:]),
    )


def gather_state(optimizer: PartsOptimizer) -> dict[str, Tensor]:
    """Copies of all tensors of a model and its optimizer, whole, on every rank; every rank calls this. Training may go
    on while they are written.
    """
    tensors = {}
    for name, parameter in optimizer.parameters.items():
        tensors[f"model.{name}"] = full_tensor(parameter).to("cpu", copy=True)
        for key, part in optimizer.state(name).items():
            tensors[f"optimizer.{name}.{key}"] = full_tensor(_as(parameter, part)).to("cpu", copy=True)
    return tensors


def write(tensors: dict[str, Tensor], config: TrainConfig, progress: Progress, folder: Path) -> Path:
    """Write a checkpoint that appears whole or not at all, then drop the oldest beyond ``config.keep``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{progress.step:06d}"
    scratch = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder))
    try:
        save_file(tensors, scratch / STATE, metadata={"format": "pt"})
        about = {"format": FORMAT, "version": VERSION, "task": config.family} | asdict(progress)
        (scratch / ABOUT).write_text(json.dumps(about | {"config": config.to_dict()}, indent=2) + "\n")
        for name in (STATE, ABOUT):  # on the disk before it gets its name: a power cut leaves the one before
            with open(scratch / name, "rb") as file:
                os.fsync(file.fileno())
        scratch.chmod(0o755)
        if path.exists():
            shutil.rmtree(path)
        os.rename(scratch, path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for old in found_in(folder)[: -config.keep]:
        shutil.rmtree(old, ignore_errors=True)
    return path


def check(path: Path, config: TrainConfig) -> Progress:
    """Whether a checkpoint is whole and of this training, without reading its tensors."""
    progress = _read_about(path / ABOUT, config)
    expected = _expected(get_family(config.family).task().outline(config), config)
    try:
        with safe_open(path / STATE, framework="pt") as file:
            _check_tensors(file, expected, path / STATE)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path / STATE} is not a readable safetensors file: {error}") from None
    return progress


def load(path: Path, optimizer: PartsOptimizer, config: TrainConfig) -> Progress:
    """Fill a model and its new optimizer from a checkpoint, each rank with its own rows."""
    progress = check(path, config)
    with safe_open(path / STATE, framework="pt") as file, torch.no_grad():
        for name, parameter in optimizer.parameters.items():
            part = optimizer.parts[name].detach()
            part.copy_(_read_part(file, f"model.{name}", parameter))
            for key in optimizer.keys:
                of = f"optimizer.{name}.{key}"
                # AdamW keeps its step where the host reads it
                state = file.get_tensor(of) if key == "step" else _read_part(file, of, parameter).to(part.device)
                optimizer.state(name)[key] = state
    return progress


def _expected(model: nn.Module, config: TrainConfig) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        shapes[f"model.{name}"] = list(parameter.shape)
        for key in state_keys(config):
            shapes[f"optimizer.{name}.{key}"] = [] if key == "step" else list(parameter.shape)
    return shapes


def _check_tensors(file: Any, expected: dict[str, list[int]], path: Path) -> None:
    names = set(file.keys())
    if names != expected.keys():
        missing, extra = sorted(expected.keys() - names), sorted(names - expected.keys())
        raise ValueError(
            f"{path} is not a checkpoint of this training: "
            f"missing {missing[:3] or 'nothing'}, unexpected {extra[:3] or 'nothing'}"
        )
    for name, shape in expected.items():
        part = file.get_slice(name)
        if (found := list(part.get_shape())) != shape:
            raise ValueError(f"{path}: {name} has shape {found}, this training's has {shape}")
        if part.get_dtype() != "F32":
            raise ValueError(f"{path}: {name} is of type {part.get_dtype()}, this training's is F32")


def _read_about(path: Path, config: TrainConfig) -> Progress:
    found = read_description(path, "checkpoint", FORMAT, VERSION)
    step, seconds, earlier = found.get("step"), found.get("seconds"), found.get("config")
    if not (isinstance(step, int) and isinstance(seconds, int | float) and isinstance(earlier, dict)) or step < 1:
        raise ValueError(f"{path} is not a Phantom Parallel checkpoint: expected a step, seconds and a config")
    task, data = found.get("task", "ffn"), found.get("data")
    if task != config.family:
        raise ValueError(
            f"{path.parent} is of a training of the kind {task!r}, not {config.family!r}: resume it as that"
        )
    config.check_resumes(earlier, str(path.parent))
    if data != get_family(config.family).task().data_digest(config):
        raise ValueError(f"{path.parent} was trained on data that have changed since: resume with the same")
    if step >= config.steps:
        raise ValueError(f"{path.parent} has come to step {step} already: resume with more steps than {config.steps}")
    return Progress(step, float(seconds), data)


def _as(parameter: Tensor, part: Tensor) -> Tensor:
    """A part with the layout of its parameter; a number of its own, such as AdamW's step, as it is."""
    if not isinstance(parameter, DTensor) or part.dim() == 0:
        return part
    mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
    return DTensor.from_local(part, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)


def _read_part(file: Any, name: str, parameter: Tensor) -> Tensor:
    """This rank's part of a tensor that is cut as ``parameter`` is: only that is read."""
    part: Tensor = file.get_slice(name)[own_part(parameter)] if parameter.dim() else file.get_tensor(name)
    return part.contiguous()  # fused updates take it for so
