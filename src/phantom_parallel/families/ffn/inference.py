"""Inference of feed-forward networks: their sizes, and the tensor-parallel model that equals one."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from phantom_parallel.checkpoint.parts import own_part
from phantom_parallel.families.ffn.cost import FFNShape
from phantom_parallel.families.ffn.model import FFN, FFNConfig
from phantom_parallel.infer.predictor import Predictor
from phantom_parallel.nn import PhantomLinear, TensorLinear
from phantom_parallel.nn.sharded import full_tensor, to_local


class FFNPredictor(Predictor):
    def features(self, config: FFNConfig) -> tuple[int, int]:
        return config.width, config.width

    def shape(self, config: FFNConfig, *, ranks: int, batch: int, word_bytes: int) -> FFNShape:
        return FFNShape(
            config.strategy,
            config.width,
            config.depth,
            ranks=ranks,
            batch=batch,
            blocks=config.blocks,
            ghosts=config.ghosts,
            word_bytes=word_bytes,
            bias=config.bias,
            activation=config.activation,
        )

    def baseline(self, model: FFN) -> FFN:
        return as_tensor(model)

    def baseline_words(self, config: FFNConfig, ranks: int) -> int:
        return (config.depth + ranks) * config.width**2  # its weights, and a dense layer on each rank meanwhile


@torch.no_grad()
def as_tensor(model: FFN) -> FFN:
    """The same function by tensor parallelism: every layer's dense weight, of which each rank keeps its rows.

    Every rank of the model's mesh calls this. A rank holds one whole dense layer at a time.
    """
    parameter = next(model.parameters())
    config = replace(model.config, strategy="tensor", blocks=None, ghosts=None)
    twin = FFN(config, mesh=model.mesh, device="meta", dtype=parameter.dtype)
    twin.to_empty(device=to_local(parameter).device)
    for own, layer in zip(twin.layers, model.layers, strict=True):
        assert isinstance(own, TensorLinear)
        weight, bias = _dense(layer)
        to_local(own.weight).copy_(weight[own_part(own.weight)])
        if own.bias is not None and bias is not None:
            to_local(own.bias).copy_(bias[own_part(own.bias)])
    return twin


def _dense(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """A layer's whole weight and bias."""
    dense = layer.to_dense() if isinstance(layer, PhantomLinear | TensorLinear) else layer
    assert isinstance(dense, nn.Linear)  # torch's own, in a Megatron pair
    return full_tensor(dense.weight), None if dense.bias is None else full_tensor(dense.bias)
