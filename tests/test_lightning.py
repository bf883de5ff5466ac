"""Phantom layers and the energy callback in trainings by Lightning."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

lightning = pytest.importorskip("lightning")

from phantom_parallel import replace_linear  # noqa: E402
from phantom_parallel.lightning import EnergyCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning: few workers, few batches


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
        replace_linear(self.model, blocks=4, ghosts=1)
        self.losses = []

    def training_step(self, batch, index):
        loss = (self.model(batch) - batch.flip(-1)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def fit(folder, steps, checkpoint=None):
    module, energy = Module(), EnergyCallback(profile="assumed-core")
    trainer = lightning.Trainer(
        max_steps=steps, log_every_n_steps=2, accelerator="cpu", callbacks=[energy], default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, logger=False, enable_checkpointing=False,
    )  # fmt: skip
    rows = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4), ckpt_path=checkpoint)
    trainer.save_checkpoint(folder / "checkpoint")
    return module.losses, float(trainer.logged_metrics["joules_modelled"]), energy.state_dict()["joules"]["modelled"]


def test_joules_are_logged_and_go_through_checkpoints(tmp_path):
    whole, _, _ = fit(tmp_path, 6)
    first, logged, joules = fit(tmp_path, 4)
    assert 0 < logged < joules
    second, more, _ = fit(tmp_path, 6, tmp_path / "checkpoint")
    assert first + second == pytest.approx(whole)
    assert more > joules


@pytest.mark.slow
def test_the_example_trains_on_two_ranks():
    example = Path(__file__).resolve().parent.parent / "examples" / "lightning_ranks.py"
    run = subprocess.run([sys.executable, example], capture_output=True, text=True, check=True)
    logged = ast.literal_eval(run.stdout.splitlines()[-1])
    assert logged["loss"] < 0.35  # the variance of the targets is 0.39
    assert logged["joules_modelled"] > 0
