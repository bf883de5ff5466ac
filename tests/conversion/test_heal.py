"""``phantom model heal``: a converted model comes closer to its teacher, on any ranks, resumed or not."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from phantom_parallel import heal, load_model
from phantom_parallel.cli.main import main
from phantom_parallel.families.gpt.heal import HealConfig
from phantom_parallel.train import run
from tests.cli.commands import answered, refused
from tests.conversion.test_run import TEXT, command, trained_gpt

SETTINGS = {"steps": 14, "layer_steps": 4, "batch": 4, "context": 32, "lr": 2e-3, "schedule": "constant"}
EVERY = {"log_every": 1, "eval_every": 7, "checkpoint_every": 7, "eval_windows": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dense model, its text, and the phantom model that it was converted to."""
    path = tmp_path_factory.mktemp("heal")
    (path / "text.txt").write_text(TEXT)
    trained_gpt(path / "dense", tie_embeddings=True)
    assert main(command(path / "dense", path / "text.txt", path / "phantom", "--ghosts", "1")) == 0
    return path


def healed(folder: Path, name: str, *, resume: bool = False, **changes) -> tuple[dict, list[dict]]:
    """The summary and the metrics of a healing in ``folder``."""
    paths = {"model": str(folder / "phantom"), "teacher": str(folder / "dense"), "data": str(folder / "text.txt")}
    summary = run(HealConfig(**(paths | SETTINGS | EVERY | changes)), folder / name, resume=resume)
    metrics = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return asdict(summary), metrics


@pytest.fixture(scope="module")
def once(folder):
    return healed(folder, "once")


def divergence(folder: Path, model: Path) -> float:
    """Mean divergence of the dense model's predictions from a model's, by torch."""
    tokens = torch.tensor(list(TEXT.encode()[: 8 * 32])).view(8, 32)
    with torch.no_grad():
        dense, own = (load_model(path).logits(tokens).log_softmax(-1) for path in (folder / "dense", model))
    return float((dense.exp() * (dense - own)).sum(-1).mean())


def test_the_divergence_falls_and_the_model_comes_closer_to_its_teacher(folder, once):
    summary, metrics = once
    losses = [line["loss"] for line in metrics]
    assert losses[-1] < losses[4]  # divergence, after the steps of single layers
    assert summary["teacher_loss"] < summary["eval_loss"] < summary["initial_loss"]
    assert divergence(folder, folder / "once" / "model") < 0.9 * divergence(folder, folder / "phantom")


def test_the_optimizer_starts_anew_with_the_divergence(folder, once):
    """The errors of layers and the divergence have gradients of different sizes, which Adam would take for one."""
    states = {}
    for path in (folder / "once" / "checkpoints" / "step-000014").glob("*.safetensors"):
        states |= load_file(path)
    steps = {float(value) for name, value in states.items() if name.endswith("step")}
    assert steps == {SETTINGS["steps"] - SETTINGS["layer_steps"]}


def test_embedding_and_head_stay_unless_they_are_trained(folder, once):
    before, after = (load_model(folder / name).state_dict() for name in ("phantom", "once/model"))
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) == (not name.startswith("layers.")), name
    healed(folder, "all", train_embeddings=True, steps=1, layer_steps=0)
    assert not torch.equal(load_model(folder / "all" / "model").embedding.weight, before["embedding.weight"])


@pytest.mark.slow
def test_ranks_and_resuming_change_nothing(folder, once):
    summary, metrics = once
    healed(folder, "twice", steps=7, ranks=2)
    actual, again = healed(folder, "twice", ranks=2, resume=True)
    assert [line["loss"] for line in again] == pytest.approx([line["loss"] for line in metrics], rel=1e-3)
    for name in ("eval_loss", "initial_loss", "teacher_loss"):
        assert actual[name] == pytest.approx(summary[name], rel=1e-3)


def test_resuming_in_one_process_is_exact(folder, once):
    healed(folder, "resumed", steps=7)
    actual, _ = healed(folder, "resumed", resume=True)
    assert actual["eval_loss"] == once[0]["eval_loss"]


def test_the_command_heals_and_the_model_generates(folder, capsys):
    paths = [f"--{name}={folder / path}" for name, path in (("model", "phantom"), ("teacher", "dense"))]
    options = ["--steps", 2, "--batch", 2, "--context", 32, "--data", folder / "text.txt"]
    actual = answered(capsys, "model", "heal", *paths, *options, "--out", folder / "cli")
    assert actual["step"] == 2
    assert actual["teacher_loss"] < actual["initial_loss"]
    assert main(["generate", "--model", str(folder / "cli" / "model"), "--prompt", "Every", "--tokens", "3"]) == 0
    assert main(["model", "heal", "--resume", "--out", str(folder / "cli"), "--steps", "3"]) == 0
    capsys.readouterr()
    message = refused(capsys, "train", "gpt", "--resume", "--out", folder / "cli", "--steps", 4)
    assert "phantom model heal" in message


def test_mistakes_are_one_line(folder, tmp_path, capsys):
    trained_gpt(tmp_path / "other", vocab=300)
    (tmp_path / "short.txt").write_text("short")
    text = str(folder / "text.txt")
    for model, teacher, data, message in (
        ("phantom", "missing", text, "missing is not a model folder"),
        ("phantom", str(tmp_path / "other"), text, "vocab=300"),
        ("dense", "dense", text, "is a dense model"),
        ("phantom", "dense", str(tmp_path / "short.txt"), "too few for a window"),
    ):
        paths = ["--model", folder / model, "--teacher", folder / teacher, "--data", data]
        assert message in refused(capsys, "model", "heal", *paths, "--context", 32, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="longer than the models' context of 64"):
        heal(folder / "phantom", folder / "dense", text, tmp_path / "out", context=65)
    with pytest.raises(ValueError, match="layer_steps must be from 0 to steps=2"):
        heal(folder / "phantom", folder / "dense", text, tmp_path / "out", context=32, steps=2, layer_steps=3)
