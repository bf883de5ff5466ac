"""Whole models as safetensors and JSON."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel import FFN, FFNConfig, gather_features, load_model, save_model, shard_features

PHANTOM = FFNConfig(width=16, depth=2, blocks=8, ghosts=2)
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_dtype_is_the_files_unless_asked_otherwise(tmp_path, dtype):
    save_model(FFN(PHANTOM, dtype=dtype), tmp_path / "model")
    assert load_model(tmp_path / "model").layers[0].local.dtype == dtype
    assert load_model(tmp_path / "model", dtype=torch.float32).layers[0].local.dtype == torch.float32


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


@pytest.mark.parametrize("config", [PHANTOM, TENSOR, MEGATRON], ids=["phantom", "tensor", "megatron"])
@pytest.mark.parametrize(("written_on", "read_on"), [(4, 2), (1, 8), (2, 1)])
def test_models_move_between_numbers_of_ranks(ranks, tmp_path, written_on, read_on, config):
    expected = ranks(written_on)(write, str(tmp_path / "model"), config)[0]
    for found in ranks(read_on)(read, str(tmp_path / "model")):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(load_model(tmp_path / "model")(torch.arange(48.0).view(3, 16) / 48).detach(), expected)


def test_a_folder_that_exists_is_kept_unless_overwritten(tmp_path):
    first = saved(tmp_path)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        saved(tmp_path)
    torch.testing.assert_close(load_model(tmp_path / "model").layers[0].local, first.layers[0].local)
    other = FFN(PHANTOM)
    save_model(other, tmp_path / "model", overwrite=True)
    torch.testing.assert_close(load_model(tmp_path / "model").layers[0].local, other.layers[0].local)


def test_a_failed_write_leaves_the_old_model_and_nothing_else(tmp_path, monkeypatch):
    first = saved(tmp_path)

    def fail(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr("phantom_parallel.checkpoint.model.write_tensor_file", fail)
    with pytest.raises(OSError, match="no space left"):
        save_model(FFN(PHANTOM), tmp_path / "model", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    torch.testing.assert_close(load_model(tmp_path / "model").layers[0].local, first.layers[0].local)


def change_config(folder: Path, change) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "is not a readable model description"),
        (lambda f: (f / "config.json").write_text("{"), "is not a readable model description"),
        (lambda f: (f / "config.json").write_text("{}"), "is not a Phantom Parallel model"),
        (lambda f: change_config(f, lambda c: c.update(version=99)), "has version 99, this release reads 1 and 2"),
        (lambda f: change_config(f, lambda c: c["config"].update(blocks=3)), "blocks=3 does not divide"),
        (lambda f: change_config(f, lambda c: c["config"].update(surprise=1)), "surprise"),
        (lambda f: change_config(f, lambda c: c["config"].pop("width")), "width"),
        (lambda f: change_config(f, lambda c: c["config"].update(depth=3)), r"missing \['layers.2.bias'"),
        (
            lambda f: change_config(f, lambda c: c["config"].update(ghosts=1)),
            "has shape .* the model that config.json describes has",
        ),
        (lambda f: (f / "model.safetensors").unlink(), "is not a readable safetensors file"),
        (lambda f: (f / "model.safetensors").write_bytes(b"junk"), "is not a readable safetensors file"),
        (
            lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-100]),
            "is not a readable safetensors file",
        ),
    ],
)
def test_a_damaged_model_is_an_error_that_names_the_file(tmp_path, damage, message):
    saved(tmp_path)
    damage(tmp_path / "model")
    with pytest.raises(ValueError, match=message) as caught:
        load_model(tmp_path / "model")
    assert str(tmp_path / "model") in str(caught.value)


def test_someone_elses_tensors_are_refused(tmp_path):
    saved(tmp_path)
    path = tmp_path / "model" / "model.safetensors"
    save_file(load_file(path) | {"extra": torch.ones(2)}, path)
    with pytest.raises(ValueError, match=r"unexpected \['extra'\]"):
        load_model(tmp_path / "model")
