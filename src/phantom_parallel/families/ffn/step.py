"""An FFN built as a shape describes it, for dry runs and timed steps."""

from dataclasses import fields

import torch
from torch.distributed.device_mesh import DeviceMesh

from phantom_parallel.cost.steps import DTYPES, TrainingStep
from phantom_parallel.families.ffn.cost import FFNShape
from phantom_parallel.families.ffn.model import FFN, FFNConfig


def build_step(shape: FFNShape, mesh: DeviceMesh | None, *, device: str) -> TrainingStep:
    """The model on this rank, and its forward pass on random rows; the loss is the sum of the outputs."""
    config = FFNConfig(**{field.name: getattr(shape, field.name) for field in fields(FFNConfig)})
    dtype = DTYPES[shape.word_bytes]
    model = FFN(config, mesh=mesh, device=device, dtype=dtype, wire=shape.wire)
    features = shape.model_features[0] // (shape.ranks if model.shards_features else 1)
    x = torch.randn(shape.batch, features, device=device, dtype=dtype, requires_grad=shape.input_grad)
    return TrainingStep(model, lambda: model(x).sum())
