"""Whole models as safetensors and JSON."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from phantom_parallel import (
    FFN,
    GPT,
    FFNConfig,
    GPTConfig,
    gather_features,
    load_model,
    save_model,
    shard_features,
)
from phantom_parallel.nn.sharded import full_tensor

PHANTOM = FFNConfig(width=16, depth=2, blocks=8, ghosts=2)
SHARED = FFNConfig(width=16, depth=2, blocks=2, ghosts=4)  # on more ranks, several share each block
MEGATRON = FFNConfig(width=16, depth=3, strategy="megatron")
TENSOR = FFNConfig(width=16, depth=2, strategy="tensor", bias=False, activation="tanh")


def saved(folder: Path, config: FFNConfig = PHANTOM) -> FFN:
    model = FFN(config)
    save_model(model, folder / "model")
    return model


@pytest.mark.parametrize("config", [PHANTOM, TENSOR, FFNConfig(width=8, depth=1, strategy="dense")])
def test_a_model_comes_back_as_it_was(tmp_path, config):
    model = saved(tmp_path, config)
    again = load_model(tmp_path / "model")
    x = torch.randn(3, config.width)
    assert again.config == config
    assert torch.equal(again(x), model(x))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]


def write(path: str, config: FFNConfig) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = FFN(config, mesh=mesh)
    save_model(model, path)
    with pytest.raises(
        FileExistsError, match="exists: choose another folder"
    ):  # on every rank, not only the one that writes
        save_model(model, path)
    save_model(model, path, overwrite=True)
    return output(model, mesh)


def read(path: str) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return output(load_model(path, mesh=mesh), mesh)


def output(model, mesh) -> torch.Tensor:
    x = torch.arange(48.0).view(3, 16) / 48
    return (
        gather_features(model(shard_features(x, mesh)), mesh).detach()
        if model.shards_features
        else model(x).clone().detach()
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("config", "written_on", "read_on"),
    [
        *((config, *sizes) for config in (PHANTOM, TENSOR, MEGATRON) for sizes in ((4, 2), (2, 1))),
        *((SHARED, *sizes) for sizes in ((4, 1), (2, 4))),
    ],
)
def test_models_move_between_numbers_of_ranks(ranks, tmp_path, written_on, read_on, config):
    expected = ranks(written_on)(write, str(tmp_path / "model"), config)[0]
    for actual in ranks(read_on)(read, str(tmp_path / "model")):
        torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(load_model(tmp_path / "model")(torch.arange(48.0).view(3, 16) / 48).detach(), expected)


def change_config(folder: Path, change) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").write_text("{}"), "is not a Phantom Parallel model"),
        (lambda f: change_config(f, lambda c: c.update(version=99)), "has version 99"),
        (lambda f: change_config(f, lambda c: c["config"].update(blocks=3)), "blocks=3 does not divide"),
        (lambda f: change_config(f, lambda c: c["config"].update(surprise=1)), "surprise"),
        (lambda f: change_config(f, lambda c: c["config"].update(depth=3)), r"missing \['layers.2.bias'"),
        (lambda f: change_config(f, lambda c: c["config"].update(ghosts=1)), "has shape"),
        (lambda f: (f / "model.safetensors").unlink(), r"missing \['layers.0.bias'"),
        (lambda f: (f / "model.safetensors").write_bytes(b"junk"), "not readable as safetensors"),
    ],
)
def test_a_damaged_model_is_an_error_that_names_the_folder(tmp_path, damage, message):
    saved(tmp_path)
    damage(tmp_path / "model")
    with pytest.raises(ValueError, match=message) as caught:
        load_model(tmp_path / "model")
    assert str(tmp_path / "model") in str(caught.value)


def write_layouts(path: str) -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = FFN(PHANTOM, mesh=mesh)
    save_model(model, f"{path}/one")
    save_model(model, f"{path}/several", max_shard_size=600, complete=lambda folder: (folder / "notes").write_text("x"))


def test_all_layouts_hold_the_same_model(ranks, tmp_path):
    ranks(2)(write_layouts, str(tmp_path))
    expected = load_model(tmp_path / "one").state_dict()
    assert load_file(tmp_path / "one" / "model.safetensors").keys() == expected.keys()
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():  # as Hugging Face's loaders read it
        assert torch.equal(load_file(tmp_path / "several" / file)[name], expected[name])
    assert index["metadata"]["total_size"] == sum(t.numel() * t.itemsize for t in expected.values())
    assert len(set(index["weight_map"].values())) > 1
    assert not list((tmp_path / "several").glob("shard-*"))
    assert (tmp_path / "several" / "notes").exists()
    loaded = load_model(tmp_path / "several").state_dict()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


TIED = GPTConfig(vocab=16, dim=16, layers=2, heads=4, hidden=16, blocks=4, ghosts=2, tie_embeddings=True)


def write_fully_sharded(path: str, config: GPTConfig, dp: int) -> dict[str, torch.Tensor]:
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (dp, world // dp), mesh_dim_names=("dp", "tp"))
    model = GPT(config, mesh=mesh["tp"] if world > dp else None)
    expected = {name: full_tensor(tensor).clone() for name, tensor in model.state_dict().items()}
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    save_model(model, path)
    return expected


@pytest.mark.parametrize(("count", "dp"), [(4, 2), (2, 2)], ids=["with tensor parallelism", "alone"])
@pytest.mark.parametrize("strategy", ["phantom", "megatron"])
def test_a_fully_sharded_model_is_written_by_all_its_ranks(ranks, tmp_path, strategy, count, dp):
    config = TIED if strategy == "phantom" else replace(TIED, strategy=strategy, blocks=None, ghosts=None)
    expected = ranks(count)(write_fully_sharded, str(tmp_path / "model"), config, dp)[0]
    actual = load_model(tmp_path / "model").state_dict()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
