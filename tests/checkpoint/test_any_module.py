"""Modules of a user's own: what is saved once must be the same on all ranks, and what was read must be loaded."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from phantom_parallel import PhantomLinear, load_model, save_model
from phantom_parallel.nn.sharded import full_tensor


class Block(nn.Module):
    """A module that belongs to no family: a phantom layer, one of torch's, a buffer, and a weight of two names."""

    def __init__(self, mesh=None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        nn.init.normal_(self.norm.weight)
        self.phantom = PhantomLinear(16, 16, blocks=4, ghosts=2, mesh=mesh)
        self.register_buffer("count", torch.tensor(5))
        self.also = self.norm


def world() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def write_block(path: str) -> dict[str, torch.Tensor]:
    block = Block(world())
    save_model(block, path)
    return {name: full_tensor(tensor) for name, tensor in block.state_dict().items()}


def read_block(path: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    block = load_model(path, into=Block(world()))
    return {name: full_tensor(tensor) for name, tensor in block.state_dict().items()}


@pytest.mark.parametrize(("written_on", "read_on"), [(2, 4), (4, 1)])
def test_any_module_is_saved_and_fills_one_of_the_same_structure(ranks, tmp_path, written_on, read_on):
    path = tmp_path / "block"
    expected = ranks(written_on)(write_block, str(path))[0]
    for actual in ranks(read_on)(read_block, str(path)):
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], expected[name]) for name in expected)
    alone = load_model(path, into=Block())
    assert torch.equal(alone.phantom.local, expected["phantom.local"])
    with pytest.raises(ValueError, match=r"of no model family: build the module and pass it as into"):
        load_model(path)
    with pytest.raises(ValueError, match="does not hold the module to fill: missing"):
        load_model(path, into=nn.Linear(2, 2))
    with pytest.raises(ValueError, match="those of the module given as into"):
        load_model(path, into=Block(), dtype=torch.float64)


def save_after(change: float, path: str) -> tuple[str, float]:
    """The error of saving a block whose norm rank 1 has changed, and how its norm comes back."""
    block = Block(world())
    with torch.no_grad():
        block.norm.weight += change * dist.get_rank()
    try:
        save_model(block, path)
    except ValueError as error:
        return str(error), 0.0
    again = load_model(path, into=Block(world()))
    return "", float((again.norm.weight - block.norm.weight).detach().abs().max())


def test_a_plain_tensor_that_ranks_have_trained_apart_is_not_saved_as_one_of_them(ranks, tmp_path):
    for message, _ in ranks(2)(save_after, 0.1, str(tmp_path / "model")):
        assert message.startswith("norm.weight is no DTensor, and differs between ranks by up to")
    assert not (tmp_path / "model").exists()


def test_plain_tensors_that_are_the_same_up_to_rounding_are_saved_and_come_back(ranks, tmp_path):
    for message, difference in ranks(2)(save_after, 1e-6, str(tmp_path / "drifted")):
        assert not message
        assert difference < 1e-5


def two_meshes(path: str) -> float:
    """Layers that are sharded over one dimension of a mesh, and others over the other one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        module = nn.Sequential(PhantomLinear(16, 16, blocks=4, ghosts=2, mesh=mesh["tp"]), nn.Linear(8, 8))
        fully_shard(module[1], mesh=mesh["dp"])
        return module

    module, again = build(0), build(1)
    expected = [full_tensor(parameter) for parameter in module.parameters()]
    save_model(module, path)
    load_model(path, into=again)
    return max(
        float((full_tensor(actual) - right).abs().max())
        for actual, right in zip(again.parameters(), expected, strict=True)
    )


def test_modules_on_two_dimensions_of_a_mesh_come_back(ranks, tmp_path):
    assert ranks(4)(two_meshes, str(tmp_path / "model")) == [0.0] * 4


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_only_folders_of_models_are_overwritten(tmp_path, kind):
    path = tmp_path / "mine"
    if kind == "file":
        path.write_text("mine")
    else:
        path.mkdir()
        (path / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not the folder of a model"):
        save_model(nn.Linear(2, 2), path, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
