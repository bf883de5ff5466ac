"""Phantom layers by Lightning on two ranks, with joules in its logs: ``python examples/lightning_ranks.py``."""

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.data import DataLoader

from phantom_parallel import PhantomParallel
from phantom_parallel.lightning import EnergyCallback


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same weights on every rank
        self.model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.is_parallel = False

    def configure_model(self) -> None:
        if not self.is_parallel:  # Lightning may call this again
            phantom = {"blocks": 4, "ghosts": 4, "init": "fresh"}
            plan = {
                "0": PhantomParallel(**phantom, input_layouts=Replicate()),
                "2": PhantomParallel(**phantom, output_layouts=Replicate()),
            }
            parallelize_module(self.model, self.device_mesh["tensor_parallel"], plan)
            self.is_parallel = True

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.model(batch), batch.flip(-1).tanh())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 3e-3)


if __name__ == "__main__":
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2, process_group_backend="gloo")
    energy = EnergyCallback(profile="assumed-core")  # sensors, or the watts of a profile without them
    settings = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        callbacks=[energy],
        max_steps=40,
        log_every_n_steps=10,
        **settings,
    )
    rows = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    trainer.fit(Module(), DataLoader(rows, batch_size=64))
    trainer.print({name: round(float(value), 4) for name, value in trainer.logged_metrics.items()})
