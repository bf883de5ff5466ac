"""A model family is one folder and one registry line: a third one, of the tests alone, goes through every command."""

import json

import numpy as np
import pytest
import torch

from phantom_parallel import load_model
from phantom_parallel.cli.main import main
from phantom_parallel.families.registry import get_family, register_family
from tests.cli.commands import answered
from tests.families import tiny


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A training of 20 steps on 2 ranks, resumed to 60 on one."""
    out = tmp_path_factory.mktemp("tiny") / "run"
    small = ["--features", "16", "--blocks", "4", "--ghosts", "2", "--lr", "0.05", "--eval-every", "20"]
    assert main(["train", "tiny", "--out", str(out), *small, "--ranks", "2", "--steps", "20"]) == 0
    assert main(["train", "tiny", "--out", str(out), "--resume", "--ranks", "1", "--steps", "60"]) == 0
    return out


def test_names_that_are_taken_or_unknown():
    with pytest.raises(ValueError, match="registered already"):
        register_family("ffn", "tests.families.tiny:FAMILY")
    with pytest.raises(ValueError, match="one of ffn, gpt, tiny, got 'rnn'"):
        get_family("rnn")


@pytest.mark.slow
def test_train_and_resume(trained):
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["eval_loss"] for line in lines if line["eval_loss"] is not None}
    assert set(losses) == {20, 40, 60}
    assert losses[60] < 0.1 * losses[20]  # the map doubles its inputs by now
    model = load_model(trained / "model")
    assert isinstance(model, tiny.Tiny)
    dense = model.map.to_dense().weight
    assert (dense - 2 * torch.eye(16)).abs().max() < 0.5


@pytest.mark.slow
def test_infer_on_two_ranks(trained, tmp_path, capfd):
    x = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    given = ["--model", trained / "model", "--inputs", tmp_path / "x.npy", "--out", tmp_path / "y.npy"]
    measured = answered(capfd, "infer", *given, "--ranks", 2, "--turns", 2)["measured"]
    assert set(measured) == {"phantom", "tensor"}
    dense = load_model(trained / "model").map.to_dense()
    expected = x.astype(np.float64) @ dense.weight.detach().double().numpy().T + dense.bias.detach().double().numpy()
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), expected, rtol=1e-5, atol=1e-5)


def test_dryrun_agrees_with_its_formulas(capfd):
    given = ["--features", "64", "--ranks", "8", "--blocks", "8", "--ghosts", "2", "--batch", "32"]
    assert answered(capfd, "dryrun", "tiny", *given)["differences"] == []


def test_compare_trains_it_to_the_same_loss(tmp_path, capfd):
    (tmp_path / "tiny.toml").write_text(
        """
        family = "tiny"
        strategies = ["phantom", "tensor"]
        target_loss = 1.0
        steps = 100
        seeds = 1
        [training]
        features = 16
        blocks = 4
        ghosts = 2
        ranks = 1
        eval_every = 5
        [search]
        learning_rates = [0.02, 0.05]
        steps = 20
        extend = 0
        """
    )
    actual = answered(capfd, "compare", "tiny", "--preset", tmp_path / "tiny.toml", "--out", tmp_path / "out")
    assert [cell["strategy"] for cell in actual["cells"]] == ["phantom", "tensor"]
    assert all(run["status"] == "target" for cell in actual["cells"] for run in cell["runs"])
    assert (tmp_path / "out" / "report.html").exists()
