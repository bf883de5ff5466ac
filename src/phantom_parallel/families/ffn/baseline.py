"""The tensor-parallel model that equals another one, to be run beside it on the same ranks."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from phantom_parallel.checkpoint.model import own_part
from phantom_parallel.families.ffn.model import FFN
from phantom_parallel.nn import PhantomLinear, TensorLinear
from phantom_parallel.nn.sharded import local_rows, whole


@torch.no_grad()
def as_tensor(model: FFN) -> FFN:
    """The same function by tensor parallelism: every layer's dense weight, of which each rank keeps its rows.

    Every rank of the model's mesh calls this. A rank holds one whole dense layer at a time.
    """
    parameter = next(model.parameters())
    config = replace(model.config, strategy="tensor", blocks=None, ghosts=None)
    twin = FFN(config, mesh=model.mesh, device="meta", dtype=parameter.dtype)
    twin.to_empty(device=local_rows(parameter).device)
    for own, layer in zip(twin.layers, model.layers, strict=True):
        assert isinstance(own, TensorLinear)
        weight, bias = _dense(layer)
        local_rows(own.weight).copy_(weight[own_part(own.weight)])
        if own.bias is not None and bias is not None:
            local_rows(own.bias).copy_(bias[own_part(own.bias)])
    return twin


def _dense(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """A layer's whole weight and bias."""
    dense = layer.to_dense() if isinstance(layer, PhantomLinear | TensorLinear) else layer
    assert isinstance(dense, nn.Linear)  # torch's own, in a Megatron pair
    return whole(dense.weight), None if dense.bias is None else whole(dense.bias)
