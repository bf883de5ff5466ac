"""Modules of a user's own: what is saved once must be the same on all ranks, and what was read must be loaded."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from phantom_parallel import PhantomLinear, load_model, save_model, shard_features
from phantom_parallel.nn.sharded import full_tensor


def block() -> tuple[nn.Module, torch.Tensor]:
    """A phantom layer and a plain one, on this rank's features."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1)
    module = nn.Sequential(PhantomLinear(16, 16, blocks=4, ghosts=2, mesh=mesh), nn.GELU(), nn.Linear(8, 8))
    return module, shard_features(torch.randn(5, 16), mesh)


def save_after(change: float, path: str) -> tuple[str, float]:
    """The error of saving a block whose plain layer rank 1 has changed, and how it comes back."""
    module, x = block()
    with torch.no_grad():
        module[2].weight += change * dist.get_rank() * module[2].weight.abs().max()
    expected = module(x)
    try:
        save_model(module, path)
    except ValueError as error:
        return str(error), 0.0
    again, _ = block()
    load_model(path, into=again)
    return "", float((again(x) - expected).abs().max())


def test_a_plain_tensor_that_ranks_have_trained_apart_is_not_saved_as_one_of_them(ranks, tmp_path):
    for message, _ in ranks(2)(save_after, 0.1, str(tmp_path / "model")):
        assert message.startswith("2.weight is no DTensor, and differs between ranks by up to")
    assert not (tmp_path / "model").exists()


def test_plain_tensors_that_are_the_same_up_to_rounding_are_saved_and_come_back(ranks, tmp_path):
    for message, difference in ranks(2)(save_after, 1e-6, str(tmp_path / "drifted")):
        assert not message
        assert difference < 1e-5
    assert ranks(2)(save_after, 0.0, str(tmp_path / "model")) == [("", 0.0)] * 2


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
