"""Data parallelism: copies of a model that train on different rows and average their gradients."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from phantom_parallel.ops.collectives import rank_group

_c10d = torch.ops._c10d_functional


@torch.no_grad()
def average_gradients(model: nn.Module, mesh: DeviceMesh | None) -> None:
    """Replace each gradient by its mean over the copies along ``mesh``: one all-reduce each, all under way together."""
    ranks = rank_group(mesh)
    if ranks.size == 1:
        return
    gradients, sums = [], []
    for parameter in model.parameters():
        if parameter.grad is not None and (gradient := _part(parameter.grad)).numel():
            gradients.append(gradient)
            sums.append(_c10d.all_reduce(gradient, "sum", ranks.name))
    for gradient, total in zip(gradients, sums, strict=True):
        torch.div(_c10d.wait_tensor(total), ranks.size, out=gradient)


def _part(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
