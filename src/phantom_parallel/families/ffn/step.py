"""An FFN built as a shape describes it, for dry runs and timed steps."""

from dataclasses import fields

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from phantom_parallel.cost.steps import DTYPES, FAKE, TrainingStep, on_device
from phantom_parallel.distributed.pipeline import Pipeline
from phantom_parallel.families.ffn.cost import FFNShape
from phantom_parallel.families.ffn.model import FFN, FFNConfig


def build_step(shape: FFNShape, mesh: DeviceMesh | None, *, device: str) -> TrainingStep:
    """The model on this rank, and its forward pass on random rows; the loss is the sum of the outputs."""
    config = FFNConfig(**{field.name: getattr(shape, field.name) for field in fields(FFNConfig)})
    dtype, where = DTYPES[shape.word_bytes], "cpu" if device == FAKE else device
    made_on = "meta" if device == FAKE else device
    model = FFN(
        config,
        mesh=mesh,
        device=made_on,
        dtype=dtype,
        wire=shape.wire,
        reshard_after_forward=shape.reshard_after_forward,
    )
    if device == FAKE:
        on_device(model, where)
    features = shape.model_features[0] // (shape.ranks if model.shards_features else 1)
    rows = shape.batch // shape.ranks if shape.strategy == "fsdp" else shape.batch
    x = torch.randn(rows, features, device=where, dtype=dtype, requires_grad=shape.input_grad)
    if shape.stage is None or mesh is None:
        return TrainingStep(model, lambda: model(x).sum())

    def run(entered: Tensor, targets: Tensor | None) -> Tensor:
        return model(entered) if targets is None else model(entered).sum()

    pipeline = Pipeline(
        model,
        run,
        mesh,
        stream=lambda rows: torch.empty(rows, shape.width, device="meta", dtype=dtype),
        micro_batches=shape.stage.micro_batches,
        device=torch.device(where),
    )
    return TrainingStep(model, lambda: pipeline.forward_backward(x, x), pipeline=pipeline)
