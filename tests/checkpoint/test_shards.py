"""Folders that ranks write and read together: torch's own reader, and errors that all ranks raise."""

import errno
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from phantom_parallel.checkpoint import shards
from phantom_parallel.checkpoint.shards import (
    Part,
    StoredTensors,
    group_of,
    save_parts,
    storage_group,
    write_file,
)

ROWS = 6  # does not divide by 4: a rank holds nothing


def whole() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "rows": torch.randn(ROWS, 5, generator=generator),
        "columns": torch.randn(3, 8, generator=generator),
        "replicated": torch.randn(4, generator=generator),
        "plain": torch.arange(5),
        "step": torch.tensor(3.0),
        "flags": torch.tensor([True, False]),
        "empty": torch.empty(0, 4),
    }


def cut(mesh) -> dict[str, torch.Tensor]:
    layouts = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}
    return {
        name: distribute_tensor(tensor, mesh, [layouts[name]], src_data_rank=None) if name in layouts else tensor
        for name, tensor in whole().items()
    }


def write(path: str) -> None:
    tensors = cut(init_device_mesh("cpu", (dist.get_world_size(),)))
    parts = {name: Part.of(tensor) for name, tensor in tensors.items()}
    save_parts(parts, Path(path), storage_group(group_of(tensors.values())), prefix="state", finish=lambda folder: None)


def read(path: str, by_torch: bool) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = {name: torch.zeros_like(tensor) for name, tensor in cut(mesh).items()}
    if by_torch:
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(path))
    else:
        StoredTensors(Path(path)).read({name: Part.of(tensor) for name, tensor in tensors.items()})
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}


def equal(actual: dict[str, torch.Tensor]) -> bool:
    return actual.keys() == whole().keys() and all(torch.equal(actual[name], whole()[name]) for name in actual)


@pytest.mark.parametrize(("written_on", "read_on"), [(1, 4), (4, 2)])
def test_any_ranks_and_torchs_own_reader_read_what_any_other_ranks_wrote(ranks, tmp_path, written_on, read_on):
    path = tmp_path / "folder"
    ranks(written_on)(write, str(path))
    assert len(list(path.glob("state-*.safetensors"))) <= written_on
    for actual in (*ranks(read_on)(read, str(path), False), *ranks(read_on)(read, str(path), True)):
        assert equal(actual)
    assert equal({name: StoredTensors(path).load(name) for name in whole()})


def fail_on_one_rank(path: str, failing: int) -> str:
    def full(path, *args):
        if dist.get_rank() == failing:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write_file(path, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "write_file", full)
        with pytest.raises(OSError, match="No space left") as caught:
            write(path)
    return str(caught.value)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_full_disk_on_one_rank_is_raised_on_all_and_leaves_nothing(ranks, tmp_path, failing):
    actual = ranks(2)(fail_on_one_rank, str(tmp_path / "folder"), failing)
    assert actual == [f"{tmp_path / 'folder'} cannot be written: No space left on device on rank {failing}"] * 2
    assert not list(tmp_path.iterdir())


def test_tensors_that_share_memory_or_are_not_contiguous_are_written(tmp_path):
    base = torch.arange(6.0).view(2, 3)
    write_file(tmp_path / "file", {"a": base, "b": base, "c": base.t(), "d": base[1]}, {"format": "pt"})
    actual = load_file(tmp_path / "file")
    assert torch.equal(actual["b"], base)
    assert torch.equal(actual["c"], base.t())
    assert torch.equal(actual["d"], base[1])
