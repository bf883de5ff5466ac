"""Inference of feed-forward networks: their sizes, and the tensor-parallel model that computes the same function."""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from phantom_parallel.checkpoint.shards import own_part
from phantom_parallel.families.ffn.cost import FFNShape
from phantom_parallel.families.ffn.model import FFN, FFNConfig
from phantom_parallel.infer.predictor import Predictor
from phantom_parallel.nn import PhantomLinear, TensorLinear
from phantom_parallel.nn.sharded import full_tensor, to_local
from phantom_parallel.utils.wire import WireFormat


class FFNPredictor(Predictor):
    """The part of ``phantom infer`` that depends on FFNs."""

    def features(self, config: FFNConfig) -> tuple[int, int]:
        return config.model_features

    def shape(self, config: FFNConfig, *, ranks: int, batch: int, word_bytes: int, wire: WireFormat) -> FFNShape:
        return FFNShape(
            config.strategy,
            config.width,
            config.depth,
            ranks=ranks,
            batch=batch,
            blocks=config.blocks,
            ghosts=config.ghosts,
            word_bytes=word_bytes,
            wire=wire,
            bias=config.bias,
            activation=config.activation,
            in_features=config.in_features,
            out_features=config.out_features,
        )

    def baseline(self, model: FFN) -> FFN:
        return as_tensor(model)

    def baseline_words(self, config: FFNConfig, ranks: int) -> int:
        sizes = [math.prod(config.features_of(index)) for index in range(config.depth)]
        return sum(sizes) + ranks * max(sizes)  # its weights, and one dense layer on each rank


@torch.no_grad()
def as_tensor(model: FFN) -> FFN:
    """Return the tensor-parallel model that computes the same function: each rank keeps its rows of every dense weight.

    Every rank of the model's mesh calls this. A rank holds one whole dense layer at a time.
    """
    parameter = next(model.parameters())
    config = replace(model.config, strategy="tensor", blocks=None, ghosts=None)
    baseline = FFN(config, mesh=model.mesh, device="meta", dtype=parameter.dtype, wire=model.wire)
    baseline.to_empty(device=to_local(parameter).device)
    for sharded, layer in zip(baseline.layers, model.layers, strict=True):
        assert isinstance(sharded, TensorLinear)
        weight, bias = _dense(layer)
        to_local(sharded.weight).copy_(weight[own_part(sharded.weight)])
        if sharded.bias is not None and bias is not None:
            to_local(sharded.bias).copy_(bias[own_part(sharded.bias)])
    return baseline


def _dense(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return a layer's whole weight and bias."""
    dense = layer.to_dense() if isinstance(layer, PhantomLinear | TensorLinear) else layer
    assert isinstance(dense, nn.Linear)  # torch's own, in a Megatron pair
    return full_tensor(dense.weight), None if dense.bias is None else full_tensor(dense.bias)
