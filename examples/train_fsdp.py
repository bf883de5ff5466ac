"""Phantom layers and FSDP2 on a 2-D mesh: ``torchrun --nproc-per-node 4 examples/train_fsdp.py``.

Features are sharded over 2 ranks by phantom layers, and weights over the copies by FSDP2, which have their own data.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import parallelize_module

from phantom_parallel import PhantomParallel, parameter_groups

TP = 2

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
copies = int(os.environ["WORLD_SIZE"]) // TP
mesh = init_device_mesh(device.type, (copies, TP), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)  # the same weights on every rank

model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
phantom = {"blocks": 8, "ghosts": 4, "init": "fresh"}
plan = {
    "0": PhantomParallel(**phantom, input_layouts=Replicate()),
    "[1-3]": PhantomParallel(**phantom),
    "4": PhantomParallel(**phantom, output_layouts=Replicate()),
}
parallelize_module(model, mesh["tp"], plan)
for layer in model[::2]:
    fully_shard(layer, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(parameter_groups(model, 3e-3))

data = torch.Generator().manual_seed(1 + mesh["dp"].get_local_rank())  # the same for the ranks that share a copy
for step in range(steps):
    x = torch.randn(64, 64, generator=data).to(device)
    loss = nn.functional.mse_loss(model(x), x.flip(-1).tanh())
    optimizer.zero_grad()
    loss.backward()  # FSDP2 averages the gradients of the copies
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    mean = loss.detach()
    dist.all_reduce(mean, group=mesh["dp"].get_group())
    if mesh.get_rank() == 0 and (step % 20 == 0 or step == steps - 1):
        print(f"step {step:4}  loss {mean.item() / copies:.4f}")
