"""Dry runs: the real model code on tensors without data, in a process group without processes.

One process plays one rank of any number. What is counted is what that rank would compute, send and keep.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from phantom_parallel.cost.check import differences
from phantom_parallel.cost.ledger import Ledger
from phantom_parallel.cost.terms import Memory, Shape
from phantom_parallel.distributed.data_parallel import average_gradients
from phantom_parallel.families.ffn.cost import FFNShape
from phantom_parallel.families.ffn.model import FFN, FFNConfig
from phantom_parallel.families.gpt.cost import GPTShape
from phantom_parallel.families.gpt.model import GPT, Layer

_aten = torch.ops.aten
DTYPES = {8: torch.float64, 4: torch.float32, 2: torch.bfloat16}


@dataclass(frozen=True)
class DryRun:
    """What one rank did in one step, and where the formulas differ from it (nowhere, one hopes)."""

    shape: FFNShape | GPTShape
    ledger: Ledger
    memory: Memory
    differences: list[str]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        settings = {field.name: getattr(self.shape, field.name) for field in fields(self.shape) if field.init}
        settings["batch"] = self.shape.batch * self.shape.dp  # over all copies, as it is asked for
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


def dry_run(shape: FFNShape | GPTShape) -> DryRun:
    """One step of ``shape.rank`` of the shape's ranks on meta tensors: of training, or of what the shape's task is."""
    started = time.perf_counter()
    with fake_ranks(shape) as (copies, mesh):
        if isinstance(shape, GPTShape):
            root, (ledger, memory) = "GPT", gpt_step(shape, mesh, copies, device="meta")
        else:
            root, (ledger, memory) = "FFN", ffn_step(shape, mesh, copies)
    wrong = [*differences(shape, ledger, native=True, root=root), *memory_differences(shape, memory)]
    return DryRun(shape, ledger, memory, wrong, time.perf_counter() - started)


def memory_differences(shape: Shape, counted: Memory) -> list[str]:
    """Where the formulas' memory and the counted one differ."""
    expected = asdict(shape.memory)
    return [
        f"memory of {name}: predicted {expected[name]}, counted {found}"
        for name, found in asdict(counted).items()
        if found != expected[name]
    ]


def ffn_step(shape: FFNShape, mesh: DeviceMesh | None, copies: DeviceMesh | None) -> tuple[Ledger, Memory]:
    """A training step of a feed-forward network on meta tensors."""
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
        z, kept = kept_for_backward(lambda: model(x), model.parameters())
        z.sum().backward()
        with ledger.phase("sync"):
            average_gradients(model, copies)
    return ledger, _trained(model, shape.optimizer, kept)


def gpt_step(
    shape: GPTShape, mesh: DeviceMesh | None, copies: DeviceMesh | None, *, device: str
) -> tuple[Ledger, Memory]:
    """A step of a transformer, of the shape's task, on any device. Tokens are all 0: work does not depend on them."""
    model = GPT(shape.config, mesh=mesh, device=device, dtype=DTYPES[shape.word_bytes], recompute=shape.recompute)
    tokens = torch.zeros(shape.batch, shape.sequence, dtype=torch.long, device=device)
    for layer in model.layers if device == "meta" else ():
        assert isinstance(layer, Layer)
        layer.attention.forward = _with_fused_kernel(layer.attention.forward)  # type: ignore[method-assign]
    if shape.task != "train":
        return _inference(model, tokens, shape.past)
    targets = torch.zeros_like(tokens)
    held = (*model.parameters(), *model._rotary())  # the tables are made once and belong to the model
    entering = model.layers if shape.recompute else ()
    with Ledger() as ledger:
        loss, kept = kept_for_backward(lambda: model.loss(tokens, targets), held, entering=entering)
        loss.backward()
        with ledger.phase("sync"):
            average_gradients(model, copies)
    return ledger, _trained(model, shape.optimizer, kept)


@torch.no_grad()  # not inference mode: see `Ledger`
def _inference(model: GPT, tokens: Tensor, past: int) -> tuple[Ledger, Memory]:
    """A cache made and filled by a prompt, or, as if ``past`` positions were in it already, by what follows them."""
    ledger = Ledger()
    with nullcontext() if past else ledger:
        cache = model.new_cache(tokens.shape[0], past + tokens.shape[1])
    cache.position = past
    with ledger:
        model.logits(tokens, cache, last=True)
    held = [cache.keys, cache.values]
    if cache.head is not None and _storage(cache.head)._cdata != _storage(model.embedding.weight)._cdata:
        held.append(cache.head)
    parameters = sum(_bytes(p) for p in model.parameters())
    return ledger, Memory(parameters, gradients=0, optimizer=0, activations=sum(_bytes(tensor) for tensor in held))


def _trained(model: nn.Module, optimizer: str, kept: int) -> Memory:
    return Memory(
        parameters=sum(_bytes(p) for p in model.parameters()),
        gradients=sum(_bytes(p.grad) for p in model.parameters() if p.grad is not None),
        optimizer=_optimizer_bytes(model, optimizer),
        activations=kept,
    )


@contextmanager
def fake_ranks(shape: FFNShape | GPTShape) -> Iterator[tuple[DeviceMesh | None, DeviceMesh | None]]:
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


def kept_for_backward(
    function: Callable[[], Tensor], weights: Iterable[Tensor], *, entering: Iterable[nn.Module] = ()
) -> tuple[Tensor, int]:
    """The function's result, and the bytes of activations that autograd keeps for it: each storage once, no weights.

    ``entering``: modules whose first argument is kept although autograd does not say so, those that are recomputed.
    """
    held = {_storage(weight)._cdata for weight in weights}
    kept: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage._cdata not in held:
            kept[storage._cdata] = storage  # held, so that no other takes its place
        return tensor

    def enters(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        pack(arguments[0])

    with ExitStack() as hooks:
        for module in entering:
            hooks.callback(module.register_forward_pre_hook(enters).remove)
        hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        result = function()
    return result, sum(storage.nbytes() for storage in kept.values())


def _with_fused_kernel(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Attention on meta tensors by the kernel that processors use, where torch would fall back to single products."""

    class Fused(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if function is F.scaled_dot_product_attention:
                return _Attention.apply(*args[:3], kwargs["is_causal"])
            return function(*args, **kwargs)

    def fused(*args: Any, **kwargs: Any) -> Tensor:
        with Fused():
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
