"""Train a network with phantom layers on ranks: ``torchrun --nproc-per-node 2 examples/train.py``."""

import os
import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import parallelize_module

from phantom_parallel import PhantomParallel, parameter_groups

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),))
torch.manual_seed(0)  # the same weights and data on every rank

model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
phantom = {"blocks": 8, "ghosts": 4, "init": "fresh"}
plan = {
    "0": PhantomParallel(**phantom, input_layouts=Replicate()),  # takes all features
    "[1-3]": PhantomParallel(**phantom),  # each rank has its own features
    "4": PhantomParallel(**phantom, output_layouts=Replicate()),  # returns all features
}
parallelize_module(model, mesh, plan)
optimizer = torch.optim.AdamW(parameter_groups(model, 3e-3))

for step in range(steps):
    x = torch.randn(64, 64).to(device)
    loss = nn.functional.mse_loss(model(x), x.flip(-1).tanh())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the whole model
    optimizer.step()
    if mesh.get_rank() == 0 and (step % 20 == 0 or step == steps - 1):
        print(f"step {step:4}  loss {loss.item():.4f}")
