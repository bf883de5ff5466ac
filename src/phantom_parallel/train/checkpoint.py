"""Checkpoints of a training: a folder ``step-000100`` with a safetensors file of each rank and ``checkpoint.json``.

Model and optimizer tensors are named by their parameter, and the files say which part of a tensor they have, so that
any number of ranks reads what any other has written. Nothing is pickled: reading a stranger's checkpoint runs none of
their code. Version 1 had one file of whole tensors, ``state.safetensors``, and is still read.
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phantom_parallel.checkpoint.description import described_files, read_description
from phantom_parallel.checkpoint.parts import Group, Part, Parts, on_every_rank, rank_in, shared_scratch
from phantom_parallel.checkpoint.shards import read_metadata, read_shards, save_shards, verify
from phantom_parallel.checkpoint.tensor_file import FileDigest
from phantom_parallel.train.config import TrainConfig
from phantom_parallel.train.optimizer import PartsOptimizer, state_keys
from phantom_parallel.utils.files import remove_folder, replace_folder, write_json

FORMAT, VERSION = "phantom-parallel-checkpoint", 2
ABOUT = "checkpoint.json"
_STATE_V1 = "state.safetensors"
_HEADROOM = 1 << 20  # bytes for headers and the description


@dataclass(frozen=True)
class Progress:
    """How far a training is: steps done, seconds that they took, and a digest of the data where the config does not
    determine them. ``summary`` is how the training ended, if it ended at this step.
    """

    step: int
    seconds: float
    data: str | None = None
    summary: dict[str, Any] | None = None


def found_in(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    return sorted(
        (path for path in folder.glob("step-*") if path.name[5:].isdigit() and path.is_dir()),
        key=step_of,
    )


def step_of(path: Path) -> int:
    """The step of a checkpoint, by its name."""
    return int(path.name[5:])


def path_of(folder: Path, step: int) -> Path:
    """The checkpoint of a step."""
    return folder / f"step-{step:06d}"


def parts_of(optimizer: PartsOptimizer) -> Parts:
    """This rank's parts of a model and its optimizer, by the names that they have in a checkpoint."""
    parts = {}
    for name, parameter in optimizer.parameters.items():
        parts[f"model.{name}"] = Part.of(parameter)
        for key, values in optimizer.state(name).items():
            parts[_of(name, key)] = Part.like(parameter, values) if values.dim() else Part.of(values)
    return parts


def stage(parts: Parts) -> Parts:
    """Copies in the host's memory, so that training may continue while they are written."""
    return {
        name: Part(part.values.to("cpu", copy=True).contiguous(), part.offsets, part.shape)
        for name, part in parts.items()
    }


def non_finite(parts: Parts) -> str | None:
    """Name of the first of this rank's parts with a value that is not finite; None if there is none."""
    return next((name for name, part in parts.items() if not bool(part.values.isfinite().all())), None)


def missing_bytes(parameters: int, config: TrainConfig, folder: Path) -> int:
    """How many bytes the disk of ``folder`` lacks for the next checkpoint of a model with so many parameters."""
    needed = 4 * parameters * (1 + sum(key != "step" for key in state_keys(config))) + _HEADROOM
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return max(0, needed - shutil.disk_usage(existing).free)


def write(parts: Parts, config: TrainConfig, progress: Progress, folder: Path, group: Group) -> Path:
    """Write a checkpoint that appears whole or not at all, then drop the oldest beyond ``config.keep``.

    Every rank of ``group`` calls this with its own parts. What went wrong on one rank is raised on all.
    """
    path = path_of(folder, progress.step)
    about = {"format": FORMAT, "version": VERSION, "task": config.kind, **asdict(progress)}
    with shared_scratch(path, group) as scratch:

        def finish(files: dict[str, FileDigest]) -> None:
            write_json(scratch / ABOUT, about | {"config": config.to_dict(), "files": files})
            replace_folder(scratch, path)

        save_shards(parts, scratch, group, prefix="state", finish=finish)
    if rank_in(group) == 0:
        for old in found_in(folder)[: -config.keep]:
            remove_folder(old)
    return path


def check(path: Path, config: TrainConfig) -> Progress:
    """Read a checkpoint's description and the headers of its files, but not its tensors.

    Raises:
        ValueError: If it is damaged, incomplete, or of another training.
    """
    return _check(path, config)[0]


def load(path: Path, optimizer: PartsOptimizer, config: TrainConfig, group: Group) -> Progress:
    """Fill a model and its new optimizer from a checkpoint, each rank its own part; every rank calls this.

    Raises:
        ValueError: On every rank, if the checkpoint does not fit or has changed since it was written.
    """
    progress, files = on_every_rank(lambda: _check(path, config), group)
    if all(files.values()):  # version 1 has no digests
        earlier = [one for one in found_in(path.parent) if step_of(one) < progress.step]
        otherwise = f"remove {path} to continue from {earlier[-1].name}" if earlier else "train into another folder"
        verify(path, files, group, otherwise)
    for name, part in optimizer.parts.items():
        for key in optimizer.keys:
            optimizer.state(name)[key] = _empty_state(part, key, optimizer.fused)
    on_every_rank(lambda: read_shards(parts_of(optimizer), path, files), group)
    return progress


def _of(name: str, key: str) -> str:
    return f"optimizer.{name}.{key}"


def _empty_state(part: Tensor, key: str, fused: bool) -> Tensor:
    """Memory for what the optimizer keeps of ``part``, contiguous as fused updates need it.

    AdamW has its step on the host, unless updates are fused.
    """
    if key == "step":
        return torch.empty((), device=part.device if fused else "cpu")
    return torch.empty_like(part, memory_format=torch.contiguous_format, requires_grad=False)


def _expected(model: nn.Module, config: TrainConfig) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        shapes[f"model.{name}"] = list(parameter.shape)
        for key in state_keys(config):
            shapes[_of(name, key)] = [] if key == "step" else list(parameter.shape)
    return shapes


def _check(path: Path, config: TrainConfig) -> tuple[Progress, dict[str, FileDigest]]:
    found = read_description(path / ABOUT, "checkpoint", FORMAT, (1, VERSION))
    progress = _progress(found, path, config)
    files = {_STATE_V1: {}} if found["version"] == 1 else described_files(found, path / ABOUT)
    _check_tensors(path, files, _expected(config.task().outline(config), config))
    return progress, files


def _check_tensors(path: Path, files: dict[str, FileDigest], expected: dict[str, list[int]]) -> None:
    stored = read_metadata(path, files)
    if stored.keys() != expected.keys():
        missing, extra = sorted(expected.keys() - stored.keys()), sorted(stored.keys() - expected.keys())
        raise ValueError(
            f"{path} is not a checkpoint of this training: "
            f"missing {missing[:3] or 'nothing'}, unexpected {extra[:3] or 'nothing'}"
        )
    for name, shape in expected.items():
        if (found := list(stored[name].size)) != shape:
            raise ValueError(f"{path}: {name} has shape {found}, this training's has {shape}")
        if (dtype := stored[name].properties.dtype) != torch.float32:
            raise ValueError(f"{path}: {name} is of type {dtype}, this training's is {torch.float32}")


def _progress(found: dict[str, Any], path: Path, config: TrainConfig) -> Progress:
    step, seconds, earlier = found.get("step"), found.get("seconds"), found.get("config")
    if not (isinstance(step, int) and isinstance(seconds, int | float) and isinstance(earlier, dict)) or step < 1:
        raise ValueError(f"{path / ABOUT} is not a Phantom Parallel checkpoint: expected a step, seconds and a config")
    task, data, summary = found.get("task", "ffn"), found.get("data"), found.get("summary")
    if task != config.kind:
        raise ValueError(f"{path} is of a training of the kind {task!r}, not {config.kind!r}: resume it as that")
    config.check_resumes(earlier, str(path))
    if data != config.task().data_digest(config):
        raise ValueError(f"{path} was trained on data that have changed since: resume with the same")
    ended = isinstance(summary, dict) and _still_ends(summary, step, config)
    if step >= config.steps and not ended:
        raise ValueError(f"{path} has reached step {step} already: resume with more steps than {config.steps}")
    return Progress(step, float(seconds), data, summary if ended else None)


def _still_ends(summary: dict[str, Any], step: int, config: TrainConfig) -> bool:
    """Whether a training that ended at ``step`` ends there with these settings too."""
    loss = summary.get("eval_loss")
    reached = config.target_loss is not None and isinstance(loss, int | float) and loss <= config.target_loss
    return step == config.steps or (summary.get("status") == "target" and reached)
