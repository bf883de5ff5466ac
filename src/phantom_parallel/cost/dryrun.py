"""Dry runs: the real model code on tensors without data, in a process group without processes.

One process plays one rank of any number. What is counted is what that rank would compute, send and keep.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from phantom_parallel.cost.check import differences
from phantom_parallel.cost.formulas import FFNShape, Memory
from phantom_parallel.cost.ledger import Ledger
from phantom_parallel.models import FFN, FFNConfig
from phantom_parallel.nn.replicas import average_gradients

DTYPES = {8: torch.float64, 4: torch.float32, 2: torch.bfloat16}


@dataclass(frozen=True)
class DryRun:
    """What one rank did in one training step, and where the formulas differ from it (nowhere, one hopes)."""

    shape: FFNShape
    ledger: Ledger
    memory: Memory
    differences: list[str]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        settings = {name: value for name, value in asdict(self.shape).items() if name != "layers"}
        return {
            "settings": settings,
            "flops": {phase: self.ledger.flops_of(phase) for phase in ("forward", "backward")},
            "sent_bytes": {phase: self.ledger.moved_of(phase) for phase in ("forward", "backward", "sync")},
            "memory_bytes": asdict(self.memory) | {"total": self.memory.total},
            "all_ranks": {
                "flops": self.shape.over_all_ranks(self.ledger.flops),
                "sent_bytes": self.shape.over_all_ranks(self.ledger.moved_bytes),
                "memory_bytes": self.shape.over_all_ranks(self.memory.total),
            },
            "parameters": self.shape.parameters,
            "model_parameters": self.shape.model_parameters,
            "formulas_agree": not self.differences,
            "differences": self.differences,
            "seconds": self.seconds,
            "ledger": self.ledger.to_dict(),
        }


def dry_run(shape: FFNShape) -> DryRun:
    """One training step of ``shape.rank`` of the shape's ranks, on meta tensors."""
    started = time.perf_counter()
    with fake_ranks(shape) as (copies, mesh):
        config = FFNConfig(
            width=shape.width,
            depth=shape.depth,
            strategy=shape.strategy,
            blocks=shape.blocks,
            ghosts=shape.ghosts,
            activation=shape.activation,  # type: ignore[arg-type]
            bias=shape.bias,
        )
        model = FFN(config, mesh=mesh, device="meta", dtype=DTYPES[shape.word_bytes])
        features = shape.width // shape.ranks if model.cut_features else shape.width
        x = torch.empty(shape.batch, features, device="meta", dtype=DTYPES[shape.word_bytes])
        x.requires_grad_(shape.input_grad)
        with Ledger() as ledger:
            z, kept = _forward(model, x)
            z.sum().backward()
            with ledger.phase("sync"):
                average_gradients(model, copies)
        memory = Memory(
            parameters=sum(_bytes(p) for p in model.parameters()),
            gradients=sum(_bytes(p.grad) for p in model.parameters() if p.grad is not None),
            optimizer=_optimizer_bytes(model, shape.optimizer),
            activations=kept,
        )
    wrong = differences(shape, ledger, native=True)
    for name, found in asdict(memory).items():
        if found != (expected := getattr(shape.memory, name)):
            wrong.append(f"memory of {name}: predicted {expected}, counted {found}")
    return DryRun(shape, ledger, memory, wrong, time.perf_counter() - started)


@contextmanager
def fake_ranks(shape: FFNShape) -> Iterator[tuple[DeviceMesh | None, DeviceMesh | None]]:
    """The data-parallel and the model mesh of a rank among ranks that do not exist."""
    if dist.is_initialized():
        raise RuntimeError("a dry run makes its own process group, but this process is in one already")
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    dist.init_process_group("fake", store=FakeStore(), rank=shape.rank, world_size=shape.ranks * shape.dp)
    try:
        mesh = init_device_mesh("cpu", (shape.dp, shape.ranks), mesh_dim_names=("dp", "tp"))
        yield (mesh["dp"] if shape.dp > 1 else None), (mesh["tp"] if shape.ranks > 1 else None)
    finally:
        dist.destroy_process_group()


def kept_for_backward(function: Callable[[], Tensor], parameters: Iterator[nn.Parameter]) -> tuple[Tensor, int]:
    """The function's result, and the bytes of activations that autograd keeps for it: each storage once, no weights."""
    weights = {_storage(parameter)._cdata for parameter in parameters}
    kept: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage._cdata not in weights:
            kept[storage._cdata] = storage  # held, so that no other takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    return result, sum(storage.nbytes() for storage in kept.values())


def _forward(model: FFN, x: Tensor) -> tuple[Tensor, int]:
    return kept_for_backward(lambda: model(x), model.parameters())


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


def _bytes(tensor: Tensor) -> int:
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.numel() * part.element_size()


def _optimizer_bytes(model: nn.Module, optimizer: str) -> int:
    """State of the size of parameters after one step of the real optimizer; step counters are left out."""
    made: torch.optim.Optimizer
    if optimizer == "adam":
        made = torch.optim.AdamW(model.parameters(), foreach=False)
    else:
        made = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9 if optimizer == "momentum" else 0.0, foreach=False
        )
    made.step()
    states = [value for state in made.state.values() for name, value in state.items() if name != "step"]
    return sum(_bytes(value) for value in states if isinstance(value, Tensor))
