"""Files of whole tensors in a folder: one, or several with an index as Hugging Face has it."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from phantom_parallel.checkpoint.shards import merge_shards, read_metadata
from phantom_parallel.checkpoint.tensor_file import FileDigest, TensorLayout, write_tensor_file
from phantom_parallel.utils.files import write_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def write_tensors(
    folder: Path, layouts: list[TensorLayout], load: Callable[[str], Tensor], limit: int | None = None
) -> dict[str, FileDigest]:
    """Write whole tensors to files of at most ``limit`` bytes in a folder, one tensor at a time in memory."""

    def write(file: Path, names: list[str]) -> FileDigest:
        chosen = set(names)
        found = [layout for layout in layouts if layout.name in chosen]
        return write_tensor_file(file, found, load, {"format": "pt"})

    return _write_whole(folder, layouts, limit, write)


def merge_files(
    shards: Path, files: dict[str, FileDigest], target: Path, limit: int | None, *, keep: bool = False
) -> dict[str, FileDigest]:
    """Make files of whole tensors in ``target`` from ``shards``, which are removed unless ``keep``."""
    stored = read_metadata(shards, files)
    layouts = [TensorLayout(name, tuple(about.size), about.properties.dtype) for name, about in stored.items()]
    made = _write_whole(target, layouts, limit, lambda file, names: merge_shards(shards, files, file, names))
    if not keep:
        for name in files:
            (shards / name).unlink()
    return made


def _write_whole(
    folder: Path,
    layouts: list[TensorLayout],
    limit: int | None,
    write: Callable[[Path, list[str]], FileDigest],
) -> dict[str, FileDigest]:
    """Distribute whole tensors over files of at most ``limit`` bytes, in their order, and write each file."""
    plan: list[list[str]] = [[]]
    filled = 0
    for layout in layouts:
        if plan[-1] and limit is not None and filled + layout.bytes > limit:
            plan.append([])
            filled = 0
        plan[-1].append(layout.name)
        filled += layout.bytes
    if len(plan) == 1:
        return {WEIGHTS: write(folder / WEIGHTS, plan[0])}
    files = {f"model-{index:05d}-of-{len(plan):05d}.safetensors": names for index, names in enumerate(plan, 1)}
    total = sum(layout.bytes for layout in layouts)
    weight_map = {name: file for file, names in files.items() for name in names}
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return {file: write(folder / file, names) for file, names in files.items()}
