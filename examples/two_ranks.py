"""Train a phantom model on two ranks, save it, and go on with it on one: ``python examples/two_ranks.py``.

Blocks are part of the model, so the number of ranks is free to change.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

from phantom_parallel import FFN, FFNConfig, PhantomLinear, load_model, parameter_groups, save_model, shard_features

CONFIG = FFNConfig(width=256, depth=2, blocks=8, ghosts=8)
TEACHER = PhantomLinear(CONFIG.width, CONFIG.width, blocks=8, ghosts=2)
TEACHER.reset_parameters(seed=1)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Something to learn: what a fixed phantom layer with fewer ghosts makes of noise, bent by a tanh."""
    x = torch.randn(64, CONFIG.width, generator=torch.Generator().manual_seed(step))
    return x, torch.tanh(TEACHER(x)).detach()


def train(model: FFN, first: int, steps: int, rank: int = 0) -> None:
    """Each rank computes the loss of its own features; together they are the mean over all."""
    optimizer = torch.optim.AdamW(parameter_groups(model, 3e-3))
    for step in range(first, first + steps):
        x, y = (shard_features(t, model.mesh) for t in batch(step))
        loss = (model(x) - y).square().sum() / (x.shape[0] * CONFIG.width)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            total = loss.detach().clone()
            if model.mesh is not None:
                dist.all_reduce(total, group=model.mesh.get_group())
            if rank == 0:
                print(f"step {step:4}  loss {total.item():.4f}")


def on_rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = FFN(CONFIG, mesh=init_device_mesh("cpu", (2,)))
    train(model, 0, 151, rank)
    save_model(model, Path(folder, "model"))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print("on two ranks")
        spawn(on_rank, (folder,), nprocs=2)
        print("and on one")
        train(load_model(Path(folder, "model")), 151, 150)
