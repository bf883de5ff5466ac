"""A model built as a shape describes it, with the step that the shape counts; families build them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from phantom_parallel.cost.terms import Shape
from phantom_parallel.families.registry import get_family

DTYPES = {8: torch.float64, 4: torch.float32, 2: torch.bfloat16}  # by the bytes of a word


@dataclass(frozen=True)
class TrainingStep:
    """A model and its forward pass on one batch.

    Args:
        model: This rank's part of it.
        loss: Runs the forward pass and returns a scalar.
        constants: Tensors that the model holds besides its parameters, and that are no activations.
        recomputed: Modules whose forward pass is repeated in backward: only their first argument is kept.
    """

    model: nn.Module
    loss: Callable[[], Tensor]
    constants: tuple[Tensor, ...] = ()
    recomputed: tuple[nn.Module, ...] = ()


@dataclass(frozen=True)
class InferencePass:
    """A model and a forward pass without gradients, which returns the tensors that last after it, such as a cache."""

    model: nn.Module
    forward: Callable[[], Iterable[Tensor]]


def build_step(shape: Shape, mesh: DeviceMesh | None, *, device: str = "cpu") -> TrainingStep | InferencePass:
    """Build the model of a shape on this rank of ``mesh``, with random data."""
    return get_family(shape.family).build_step(shape, mesh, device=device)


def timed_step(shape: Shape, mesh: DeviceMesh) -> Callable[[], None]:
    """A whole training step of a shape, to be timed: forward, backward and SGD on one batch."""
    step = build_step(shape, mesh)
    if not isinstance(step, TrainingStep):
        raise ValueError(f"only training steps are timed, got a shape of mode {shape.mode!r}")
    optimizer = torch.optim.SGD(step.model.parameters(), lr=1e-6)

    def run() -> None:
        step.loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return run
