"""Dry runs: the real model code on tensors without data, in a process group without processes.

One process takes the part of one rank of any number. What it computes, sends and keeps is counted and compared with
the formulas.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from phantom_parallel.cost.check import differences
from phantom_parallel.cost.kept import kept_by
from phantom_parallel.cost.ledger import Ledger
from phantom_parallel.cost.steps import FAKE, InferencePass, TrainingStep, build_step
from phantom_parallel.cost.terms import Memory, Shape
from phantom_parallel.distributed.data_parallel import average_gradients
from phantom_parallel.utils.strategies import get_strategy

_aten = torch.ops.aten


@dataclass(frozen=True)
class DryRun:
    """What one rank did in one step, and where the formulas differ from it."""

    shape: Shape
    ledger: Ledger
    memory: Memory
    differences: list[str]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        settings = {field.name: getattr(self.shape, field.name) for field in fields(self.shape) if field.init}  # type: ignore[arg-type]
        settings["batch"] = self.shape.batch * self.shape.dp  # over all copies, as options have it
        return {
            "settings": settings,
            "flops": {phase: self.ledger.flops_of(phase) for phase in ("forward", "backward")},
            "sent_bytes": {phase: self.ledger.moved_of(phase) for phase in ("forward", "backward", "sync")},
            "sent_bytes_inside_blocks": {
                phase: self.ledger.moved_of(phase, near=self.shape.inside) for phase in ("forward", "backward", "sync")
            },
            "memory_bytes": asdict(self.memory) | {"total": self.memory.total},
            "all_ranks": {
                "flops": self.shape.over_all_ranks(lambda shape: 2 * shape.multiply_adds()),
                "sent_bytes": self.shape.over_all_ranks(lambda shape: shape.moved_bytes()),
                "memory_bytes": self.shape.over_all_ranks(lambda shape: shape.memory.total),
            },
            "parameters": self.shape.parameters,
            "model_parameters": self.shape.model_parameters,
            "formulas_agree": not self.differences,
            "differences": self.differences,
            "seconds": self.seconds,
            "ledger": self.ledger.to_dict(),
        }


def dry_run(shape: Shape) -> DryRun:
    """Run one step of rank ``shape.rank`` without data, in the shape's mode, and compare it with the formulas.

    Tensors are on the meta device. FSDP2 and pipelines have fake tensors of the CPU, since they allocate and send by
    the device.
    """
    started = time.perf_counter()
    with ExitStack() as stack:
        copies, mesh = stack.enter_context(fake_ranks(shape))
        stack.enter_context(FusedAttention())
        fake = mesh is not None and not get_strategy(shape.strategy).splits_layers
        if fake:
            stack.enter_context(FakeTensorMode())
        step = build_step(shape, mesh, device=FAKE if fake else "meta")
        for module in step.recomputed if isinstance(step, TrainingStep) else ():
            module.forward = _with_fused_attention(module.forward)  # autograd does not keep the mode for backward
        ledger, memory = count_step(step, shape.optimizer, copies)
    wrong = differences(shape, ledger, native=True, root=type(step.model).__name__)
    wrong += memory_differences(shape, memory)
    return DryRun(shape, ledger, memory, wrong, time.perf_counter() - started)


def count_step(
    step: TrainingStep | InferencePass, optimizer: str = "adam", copies: DeviceMesh | None = None
) -> tuple[Ledger, Memory]:
    """Run a step, on any device, and count this rank's operations and the memory that lasts through it.

    Args:
        step: The model and its pass.
        optimizer: The kind of optimizer that updates the model after a training step.
        copies: The mesh of data-parallel copies, over which gradients are averaged.
    """
    model = step.model
    parameters = sum(_bytes(p) for p in model.parameters())
    if isinstance(step, InferencePass):
        with torch.no_grad(), Ledger() as ledger:  # not inference mode: see `Ledger`
            held = step.forward()
        return ledger, Memory(parameters, gradients=0, optimizer=0, activations=sum(map(_bytes, held)))
    with Ledger() as ledger:
        kept = kept_by(step)
        with ledger.phase("sync"):
            step.finish()
            average_gradients(model, copies)
    return ledger, Memory(
        parameters=parameters,
        gradients=sum(_bytes(p.grad) for p in model.parameters() if p.grad is not None),
        optimizer=_optimizer_bytes(model, optimizer),
        activations=kept,
    )


def memory_differences(shape: Shape, counted: Memory) -> list[str]:
    """Where the formulas' memory and the counted one differ."""
    expected = asdict(shape.memory)
    return [
        f"memory of {name}: predicted {expected[name]}, counted {found}"
        for name, found in asdict(counted).items()
        if found != expected[name]
    ]


@contextmanager
def fake_ranks(shape: Shape) -> Iterator[tuple[DeviceMesh | None, DeviceMesh | None]]:
    """The data-parallel and the model mesh of rank ``shape.rank`` in a process group whose other ranks do not exist."""
    if dist.is_initialized():
        raise RuntimeError("a dry run makes its own process group, but this process is in one already")
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    dist.init_process_group("fake", store=FakeStore(), rank=shape.rank, world_size=shape.ranks * shape.dp)
    try:
        mesh = init_device_mesh("cpu", (shape.dp, shape.ranks), mesh_dim_names=("dp", "tp"))
        yield (mesh["dp"] if shape.dp > 1 else None), (mesh["tp"] if shape.ranks > 1 else None)
    finally:
        dist.destroy_process_group()


class FusedAttention(TorchFunctionMode):
    """Attention on meta tensors by the kernel that processors use, where torch would fall back to single products."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            return _Attention.apply(*args[:3], kwargs.get("is_causal", False))
        return function(*args, **kwargs)


def _with_fused_attention(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def fused(*args: Any, **kwargs: Any) -> Tensor:
        with FusedAttention():
            return forward(*args, **kwargs)

    return fused


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        z, statistics = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        z = torch.empty_like(z.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)  # as it comes
        ctx.save_for_backward(q, k, v, z, statistics)
        ctx.causal = causal
        return z

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        return *backward(d, *ctx.saved_tensors, 0.0, ctx.causal), None


def _bytes(tensor: Tensor) -> int:
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.numel() * part.element_size()


def _shards(model: nn.Module) -> list[Tensor]:
    """A rank's parts of fully sharded parameters with their gradients, as plain tensors."""
    found = []
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        part: Tensor = parameter.to_local().detach().requires_grad_()
        part.grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else None
        found.append(part)
    return found


def _optimizer_bytes(model: nn.Module, optimizer: str) -> int:
    """State of the size of parameters after one step of the real optimizer; step counters are left out."""
    made: torch.optim.Optimizer
    parameters = _shards(model) if isinstance(model, FSDPModule) else list(model.parameters())
    if optimizer == "adam":
        made = torch.optim.AdamW(parameters, foreach=False)
    else:
        made = torch.optim.SGD(parameters, lr=0.1, momentum=0.9 if optimizer == "momentum" else 0.0, foreach=False)
    made.step()
    states = [value for state in made.state.values() for name, value in state.items() if name != "step"]
    return sum(_bytes(value) for value in states if isinstance(value, Tensor))
