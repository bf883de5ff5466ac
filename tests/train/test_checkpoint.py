"""Checkpoints that are damaged, of another training, or cut short while they are written."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from phantom_parallel.distributed.context import ParallelContext
from phantom_parallel.families.ffn.train_config import FFNTrainConfig
from phantom_parallel.train import checkpoint, train

CONFIG = FFNTrainConfig(
    width=16, depth=1, blocks=4, ghosts=2, teacher_ghosts=2, batch=8, samples=64, steps=4, checkpoint_every=2
)
STATE = "state-00001-of-00001.safetensors"  # of one rank


@pytest.fixture
def saved(tmp_path) -> Path:
    train(CONFIG, ParallelContext(), checkpoints=tmp_path)
    return tmp_path / "step-000002"


def change_tensors(path: Path, change) -> None:
    tensors = load_file(path / STATE)
    change(tensors)
    save_file(tensors, path / STATE)


def change_about(path: Path, **values) -> None:
    about = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps(about | values))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "checkpoint.json").unlink(), "is not a readable checkpoint description"),
        (lambda p: (p / "checkpoint.json").write_text("{"), "is not a readable checkpoint description"),
        (lambda p: (p / "checkpoint.json").write_text("[]"), "is not a Phantom Parallel checkpoint"),
        (lambda p: change_about(p, version=9), "has version 9, this release reads 1 and 2"),
        (lambda p: change_about(p, step="two"), "expected a step, seconds and a config"),
        (lambda p: (p / STATE).unlink(), "is not a readable safetensors file"),
        (
            lambda p: (p / STATE).write_bytes((p / STATE).read_bytes()[:-100]),
            "is not a readable safetensors file",
        ),
        (lambda p: change_tensors(p, lambda t: t.pop("model.layers.0.local")), r"missing \['model.layers.0.local'\]"),
        (lambda p: change_tensors(p, lambda t: t.update(extra=torch.ones(1))), r"unexpected \['extra'\]"),
        (
            lambda p: change_tensors(p, lambda t: t.update({"model.layers.0.local": torch.ones(3, 3)})),
            r"model.layers.0.local has shape \[3, 3\], this training's has \[16, 4\]",
        ),
        (
            lambda p: change_tensors(p, lambda t: t.update({"model.layers.0.bias": torch.ones(16).double()})),
            "is of type torch.float64, this training's is torch.float32",
        ),
    ],
)
def test_a_damaged_checkpoint_is_an_error_that_names_it(saved, damage, message):
    damage(saved)
    with pytest.raises(ValueError, match=message) as caught:
        train(CONFIG, ParallelContext(), resume=saved)
    assert str(saved) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.5}, r"was trained with lr=0.001, not 0.5: resume with the same"),
        ({"depth": 2}, r"was trained with depth=1, not 2"),
        ({"steps": 2}, "has reached step 2 already: resume with more steps than 2"),
    ],
)
def test_someone_elses_checkpoint_is_an_error_that_names_the_difference(saved, change, message):
    with pytest.raises(ValueError, match=message):
        train(replace(CONFIG, **change), ParallelContext(), resume=saved)


def test_more_steps_and_other_intervals_may_be_resumed(saved):
    changed = replace(CONFIG, steps=6, log_every=3, keep=1, eval_every=2)
    assert train(changed, ParallelContext(), resume=saved)[1].step == 6


def test_a_write_that_fails_leaves_the_checkpoints_before_and_nothing_else(tmp_path, monkeypatch):
    train(replace(CONFIG, steps=2), ParallelContext(), checkpoints=tmp_path)

    def fail(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr("phantom_parallel.checkpoint.shards.write_tensor_file", fail)
    with pytest.raises(OSError, match="no space left"):
        train(CONFIG, ParallelContext(), checkpoints=tmp_path, resume=tmp_path / "step-000002")
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """The writer waits for the step after, and still writes the numbers of its own."""
    train(CONFIG, ParallelContext(), checkpoints=tmp_path / "expected")
    went_on, write = threading.Event(), checkpoint.write

    def late(parts, config, progress, folder, group):
        assert progress.step > 2 or went_on.wait(60)
        return write(parts, config, progress, folder, group)

    monkeypatch.setattr(checkpoint, "write", late)
    train(
        replace(CONFIG, log_every=1),
        ParallelContext(),
        checkpoints=tmp_path / "late",
        report=lambda record: went_on.set() if record.step == 3 else None,
    )
    expected, found = (load_file(tmp_path / name / "step-000002" / STATE) for name in ("expected", "late"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
