"""Measure the energy of a loop of one's own: ``python examples/measure_energy.py``, or with ``torchrun``.

Sensors are read where there are some (``phantom machine sensors``). Otherwise the energy is modelled with the watts of
a profile, and the result says so.
"""

import torch
import torch.distributed as dist
from torch import nn

from phantom_parallel import EnergyMeter, PhantomLinear

models = {
    "dense": nn.Linear(1024, 1024),
    "phantom": PhantomLinear(1024, 1024, blocks=8, ghosts=16),
}
group = dist.group.WORLD if dist.is_initialized() else None  # ranks measure together, and a sensor is counted once
meter = EnergyMeter(group, profile="assumed-core")
x = torch.randn(256, 1024)

for name, model in models.items():
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with meter.window(name) as window:
        for _ in range(20):
            with window.step():
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
    print(window.result)  # seconds, joules, watts, and where they come from
    if window.joules is not None:
        print(f"  {window.joules / window.result.steps:.3g} J a step")
