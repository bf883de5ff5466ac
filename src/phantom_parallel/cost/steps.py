"""A model built as a shape describes it, with the step that the shape counts; families build them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from phantom_parallel.cost.terms import Shape
from phantom_parallel.distributed.pipeline import Pipeline
from phantom_parallel.families.registry import get_family

FAKE = "fake"  # a device: the CPU, with tensors that have no data
M = TypeVar("M", bound=nn.Module)
DTYPES = {8: torch.float64, 4: torch.float32, 2: torch.bfloat16}  # by the bytes of a word


@dataclass(frozen=True)
class TrainingStep:
    """A model and its forward pass on one batch."""

    model: nn.Module  # this rank's part of it
    loss: Callable[[], Tensor]  # runs the forward pass and returns a scalar
    constants: tuple[Tensor, ...] = ()  # that the model holds besides its parameters, and that are no activations
    recomputed: tuple[nn.Module, ...] = ()  # modules whose forward pass is repeated: only their first argument is kept
    pipeline: Pipeline | None = None  # what runs the stages, if the model is one; `loss` then runs backward as well
    finish: Callable[[], None] = lambda: None  # called after backward, for gradients that ranks of a model sum

    def run(self) -> None:
        """Run the forward and the backward pass."""
        loss = self.loss()
        if self.pipeline is None:
            loss.backward()


@dataclass(frozen=True)
class InferencePass:
    """A model and a forward pass without gradients, which returns the tensors that last after it, such as a cache."""

    model: nn.Module
    forward: Callable[[], Iterable[Tensor]]


def build_step(shape: Shape, mesh: DeviceMesh | None, *, device: str = "cpu") -> TrainingStep | InferencePass:
    """Build the model of a shape on this rank of ``mesh``, with random data.

    ``device`` may be ``FAKE`` within a ``FakeTensorMode``, for models that do not run on the meta device.
    """
    return get_family(shape.family).build_step(shape, mesh, device=device)


def build_model(kind: type[M], shape: Shape, mesh: DeviceMesh | None, device: str, **settings: Any) -> M:
    """The model of a shape on this rank; on the device ``FAKE`` on the CPU, without data."""
    settings |= {"dtype": DTYPES[shape.word_bytes], "wire": shape.wire}
    settings |= {"reshard_after_forward": shape.reshard_after_forward}
    model = kind(shape.model, mesh=mesh, device="meta" if device == FAKE else device, **settings)
    if device != FAKE:
        return model
    if isinstance(model, FSDPModule):
        return model.to_empty(device="cpu")
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(torch.empty_like(parameter, device="cpu")))
    return model
