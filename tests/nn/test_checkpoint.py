"""Distributed checkpoints: written on some ranks, read on others."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from phantom_parallel import FFN, FFNConfig, parameter_groups


def build(seed: int, blocks: int):
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = FFN(FFNConfig(width=32, depth=2, blocks=blocks, ghosts=4), mesh=mesh, dtype=torch.float64)
    return model, torch.optim.AdamW(parameter_groups(model, 0.01, local=0.5)), mesh


def step(model, optimizer, mesh) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 32, generator=generator, dtype=torch.float64).chunk(mesh.size(), -1)[mesh.get_local_rank()]
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


def whole(model) -> dict[str, torch.Tensor]:
    return {
        name: p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in model.named_parameters()
    }


def save(path: str, blocks: int) -> dict[str, torch.Tensor]:
    """Two steps, a checkpoint, and one step more, whose outcome is what whoever reads it must reach."""
    model, optimizer, mesh = build(0, blocks)
    step(model, optimizer, mesh)
    step(model, optimizer, mesh)
    state, optim_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optim_state}, checkpoint_id=path)
    step(model, optimizer, mesh)
    return whole(model)


def load(path: str, blocks: int) -> dict[str, torch.Tensor]:
    model, optimizer, mesh = build(9, blocks)
    state, optim_state = get_state_dict(model, optimizer)
    everything = {"model": state, "optimizer": optim_state}
    dcp.load(everything, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=everything["model"], optim_state_dict=everything["optimizer"])
    step(model, optimizer, mesh)
    return whole(model)


@pytest.mark.parametrize(
    ("blocks", "saved_on", "loaded_on"),
    [(8, 4, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((8, 1, 4), (2, 8, 1), (4, 4, 8)))],
)
def test_training_goes_on_from_a_checkpoint_on_another_number_of_ranks(ranks, tmp_path, blocks, saved_on, loaded_on):
    expected = ranks(saved_on)(save, str(tmp_path), blocks)[0]
    for actual in ranks(loaded_on)(load, str(tmp_path), blocks):
        for name, tensor in expected.items():
            torch.testing.assert_close(actual[name], tensor, rtol=1e-11, atol=1e-11)
