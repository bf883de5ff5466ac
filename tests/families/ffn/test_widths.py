"""Models with other numbers of features in and out than between layers, by every strategy."""

import numpy as np
import pytest
import torch
from torch import nn

from phantom_parallel import FFN, load_model
from phantom_parallel.cli.main import main
from phantom_parallel.families.ffn.config import FFNTrainConfig
from phantom_parallel.families.ffn.data import open_data, rows_of_step
from tests.train.test_loop import curve, losses

IN, WIDTH, OUT, ROWS = 8, 16, 4, 64


@pytest.fixture
def data(tmp_path) -> str:
    """Targets are a fixed map of inputs, so that there is something to learn."""
    random = np.random.default_rng(0)
    x = random.standard_normal((ROWS, IN))
    np.savez(tmp_path / "data.npz", x=x, y=x @ random.standard_normal((IN, OUT)))
    return str(tmp_path / "data.npz")


def config(data: str, strategy: str = "phantom", **settings) -> FFNTrainConfig:
    blocks = {"blocks": 4, "ghosts": 2} if strategy == "phantom" else {}
    usual = {"width": WIDTH, "depth": 2, "batch": 16, "steps": 8, "log_every": 1, "lr": 0.02}
    return FFNTrainConfig.of(data=data, strategy=strategy, **usual | blocks | settings)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", ["phantom", "tensor", "megatron", "dense", "fsdp", "pipeline"])
def test_losses_are_those_of_a_plain_loop_and_the_same_on_any_ranks(ranks, data, strategy):
    run = config(data, strategy)
    torch.manual_seed(run.seed)
    dense = [layer.to_dense() for layer in FFN(run.model).layers]
    plain = nn.Sequential(dense[0], nn.ReLU(), dense[1])
    assert [tuple(layer.weight.shape) for layer in dense] == [(WIDTH, IN), (OUT, WIDTH)]
    rows, optimizer, expected = open_data(run), torch.optim.AdamW(plain.parameters(), run.lr, weight_decay=0), []
    for step in range(run.steps):
        x, y = rows.take(rows_of_step(step, rows=rows.training_rows, batch=run.batch, seed=run.seed))
        loss = nn.functional.mse_loss(plain(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    actual = curve(losses(run))
    compared = 1 if strategy == "phantom" else run.steps  # its factors are not updated as their product would be
    assert actual[:compared] == pytest.approx(expected[:compared], rel=1e-4)
    for count, copies in ((2, 1), (2, 2)) if strategy != "dense" else ((1, 2),):
        everywhere = ranks(count * copies)(losses, run.updated(ranks=count, dp=copies))
        assert curve(everywhere[0]) == pytest.approx(actual, rel=1e-4)


@pytest.mark.slow
def test_the_commands_follow_the_data(data, tmp_path):
    run, out = str(tmp_path / "run"), str(tmp_path / "y.npy")
    small = ["--width", str(WIDTH), "--ghosts", "2", "--batch", "16"]
    assert main(["train", "--out", run, "--data", data, *small, "--ranks", "2", "--steps", "4"]) == 0
    assert main(["train", "--out", run, "--resume", "--steps", "6", "--ranks", "1"]) == 0
    assert main(["infer", "--model", f"{run}/model", "--inputs", data, "--out", out, "--turns", "2"]) == 0
    x = torch.from_numpy(np.load(data)["x"]).float()
    with torch.no_grad():
        assert np.allclose(np.load(out), load_model(f"{run}/model")(x), atol=1e-5)
