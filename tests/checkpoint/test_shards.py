"""Folders that ranks write and read together: memory, torch's own reader, and errors that all ranks raise."""

import errno
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from phantom_parallel import load_model, save_model
from phantom_parallel.checkpoint import shards
from phantom_parallel.checkpoint.parts import Part, group_of, storage_group
from phantom_parallel.checkpoint.shards import merge_shards, read_metadata, read_shards, save_shards, verify
from tests.checkpoint.live_memory import LiveMemory

ROWS = 6  # does not divide by 4: a rank holds nothing


def whole() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "rows": torch.randn(ROWS, 5, generator=generator),
        "columns": torch.randn(3, 8, generator=generator),
        "replicated": torch.randn(4, generator=generator),
        "plain": torch.arange(5),
        "step": torch.tensor(3.0),
    }


def cut(mesh) -> dict[str, torch.Tensor]:
    layouts = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}
    return {
        name: distribute_tensor(tensor, mesh, [layouts[name]], src_data_rank=None) if name in layouts else tensor
        for name, tensor in whole().items()
    }


def write(folder: str) -> dict:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors, files = cut(mesh), {}
    parts = {name: Part.of(tensor) for name, tensor in tensors.items()}
    group = storage_group(group_of(tensors.values()))
    save_shards(parts, Path(folder), group, prefix="state", finish=files.update)
    return files


def read(folder: str, files: dict) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = {name: torch.zeros_like(tensor) for name, tensor in cut(mesh).items()}
    verify(Path(folder), files, storage_group(group_of(tensors.values())))
    read_shards({name: Part.of(tensor) for name, tensor in tensors.items()}, Path(folder), files)
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}


def equal(found: dict[str, torch.Tensor]) -> bool:
    return found.keys() == whole().keys() and all(torch.equal(found[name], whole()[name]) for name in found)


@pytest.mark.parametrize(("written_on", "read_on"), [(1, 4), (2, 4), (4, 1), (4, 2)])
def test_any_ranks_read_what_any_other_ranks_wrote(ranks, tmp_path, written_on, read_on):
    files = ranks(written_on)(write, str(tmp_path))[0]
    assert len(list(tmp_path.iterdir())) == len(files) <= written_on
    for found in ranks(read_on)(read, str(tmp_path), files):
        assert equal(found)
    merge_shards(tmp_path, files, tmp_path / "whole.safetensors", whole())
    assert equal(load_file(tmp_path / "whole.safetensors"))


def read_by_torch(folder: str) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = {name: torch.zeros_like(tensor) for name, tensor in cut(mesh).items() if name != "step"}
    dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(folder))
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}


def test_torchs_own_reader_reads_the_folder(ranks, tmp_path):
    ranks(4)(write, str(tmp_path))
    for found in ranks(2)(read_by_torch, str(tmp_path)):
        assert all(torch.equal(found[name], whole()[name]) for name in found)


def test_what_several_ranks_hold_is_written_once(ranks, tmp_path):
    files = ranks(4)(write, str(tmp_path))[0]
    found = read_metadata(tmp_path, files)
    assert {name: len(about.chunks) for name, about in found.items()} == {
        "rows": 3,
        "columns": 4,
        "replicated": 1,
        "plain": 1,
        "step": 1,
    }


def test_a_file_that_is_missing_is_an_error_that_names_it(ranks, tmp_path):
    files = ranks(4)(write, str(tmp_path))[0]
    with pytest.raises(ValueError, match="does not have all of columns: a file is missing"):
        read_metadata(tmp_path, list(files)[1:])
    (tmp_path / list(files)[1]).unlink()
    with pytest.raises(ValueError, match=f"{list(files)[1]} is not a readable safetensors file"):
        read_metadata(tmp_path, files)


def fail_on_one_rank(folder: str, failing: int) -> str:
    original = shards.write_tensor_file

    def full(path, *args):
        if dist.get_rank() == failing:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return original(path, *args)

    shards.write_tensor_file = full
    try:
        with pytest.raises(OSError, match="No space left") as caught:
            write(folder)
    finally:
        shards.write_tensor_file = original
    return str(caught.value)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_full_disk_on_one_rank_is_raised_on_all_and_names_the_rank(ranks, tmp_path, failing):
    found = ranks(2)(fail_on_one_rank, str(tmp_path), failing)
    assert found == [f"No space left on device on rank {failing}"] * 2


def changed_file(folder: str, files: dict) -> str:
    with pytest.raises(ValueError, match="has changed") as caught:
        read(folder, files)
    return str(caught.value)


def test_a_changed_byte_is_noticed_on_every_rank(ranks, tmp_path):
    files = ranks(2)(write, str(tmp_path))[0]
    path = tmp_path / "state-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    for message in ranks(2)(changed_file, str(tmp_path), files):
        assert message.startswith(f"{path} has changed since it was written")


LAYERS, WIDTH = 6, 1024
LARGEST = 4 * WIDTH * WIDTH
BLOCK = 1_100_000  # bytes: rows that are read at once, and small tensors of exchanges


def stack(mesh) -> torch.nn.Module:
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for layer in model:
        layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    return model


def measured(work) -> int:
    """Bytes of new tensors at once. What else a process needs is measured by benchmarks/checkpoint.py."""
    with LiveMemory() as memory:
        work()
    return memory.peak


def memory_of_a_model(folder: str) -> dict[str, int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = stack(mesh)
    return {
        "save": measured(lambda: save_model(model, Path(folder) / "model")),
        "load": measured(lambda: load_model(Path(folder) / "model", into=model)),
        "gathered": measured(lambda: [layer.weight.full_tensor() for layer in model]),
    }


@pytest.mark.parametrize("count", [2, 4])
def test_a_rank_holds_one_tensor_besides_its_own_part_of_a_model(ranks, tmp_path, count):
    for found in ranks(count)(memory_of_a_model, str(tmp_path)):
        assert found["save"] <= LARGEST + BLOCK
        assert found["load"] <= LARGEST + BLOCK
        assert found["gathered"] >= LAYERS * LARGEST  # what the count would show
