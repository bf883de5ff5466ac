"""Steps of models as shapes describe them, which families build, and dry runs of them: the real model code on tensors
without data, in a process group without processes.

One process takes the part of one rank of any number. What it computes, sends and keeps is counted and compared with
the formulas.
"""

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.overrides import TorchFunctionMode

from phantom_parallel.cost.ledger import Ledger, ProductEntry
from phantom_parallel.cost.terms import Exchange, Memory, Product, Shape
from phantom_parallel.distributed.data_parallel import average_gradients, local_part
from phantom_parallel.distributed.pipeline import Pipeline
from phantom_parallel.distributed.process_group import make_mesh
from phantom_parallel.families.registry import get_family
from phantom_parallel.ops.collectives import STAGES
from phantom_parallel.utils.strategies import StrategyName, get_strategy

_aten = torch.ops.aten
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
    recomputed: tuple[nn.Module, ...] = ()

    def run(self) -> None:
        """Run the pass."""
        self.forward()


Step = TrainingStep | InferencePass


def build_step(shape: Shape, mesh: DeviceMesh | None, *, device: str = "cpu") -> Step:
    """Build the model of a shape on this rank of ``mesh``, with random data; ``device`` may be ``FAKE`` within a
    ``FakeTensorMode``, for models that do not run on the meta device.
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


@dataclass(frozen=True)
class DryRun:
    """What one rank did in one step, and where the formulas differ from it."""

    shape: Shape
    ledger: Ledger
    memory: Memory
    differences: list[str]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        shape, ledger, phases = self.shape, self.ledger, ("forward", "backward", "sync")
        return {
            "settings": shape.to_dict() | {"batch": shape.batch * shape.dp},  # over all copies, as options have it
            "flops": {phase: ledger.flops_of(phase) for phase in phases[:2]},
            "sent_bytes": {phase: ledger.moved_of(phase) for phase in phases},
            "sent_bytes_inside_blocks": {phase: ledger.moved_of(phase, near=shape.inside) for phase in phases},
            "memory_bytes": asdict(self.memory) | {"total": self.memory.total},
            "all_ranks": {
                "flops": shape.over_all_ranks(lambda shape: 2 * shape.multiply_adds()),
                "sent_bytes": shape.over_all_ranks(lambda shape: shape.moved_bytes()),
                "memory_bytes": shape.over_all_ranks(lambda shape: shape.memory.total),
            },
            "parameters": shape.parameters,
            "model_parameters": shape.model_parameters,
            "formulas_agree": not self.differences,
            "differences": self.differences,
            "seconds": self.seconds,
            "ledger": ledger.to_dict(),
        }


def dry_run(shape: Shape) -> DryRun:
    """Run one step of rank ``shape.rank`` without data, in the shape's mode, and compare it with the formulas.

    Tensors are on the meta device, or fake ones of the CPU for FSDP2 and pipelines, which allocate by the device.
    """
    started = time.perf_counter()
    with ExitStack() as stack:
        copies, mesh = stack.enter_context(fake_ranks(shape))
        stack.enter_context(FusedAttention())
        fake = not shape.splits_work
        if fake:
            stack.enter_context(FakeTensorMode())
        step = build_step(shape, mesh, device=FAKE if fake else "meta")
        for module in step.recomputed:
            module.forward = FusedAttention()(module.forward)  # autograd does not keep the mode for backward
        if shape.pp > 1:  # DTensor computes the shapes of whole tensors on fake ones once, which is no rank's work
            with nullcontext() if isinstance(step, TrainingStep) else torch.no_grad():
                step.run()
            step.model.zero_grad()
        ledger, memory = count_step(step, shape, copies)
    wrong = differences(shape, ledger, native=True, root=type(step.model).__name__)
    wrong += memory_differences(shape, memory)
    return DryRun(shape, ledger, memory, wrong, time.perf_counter() - started)


def count_step(step: Step, shape: Shape, copies: DeviceMesh | None = None) -> tuple[Ledger, Memory]:
    """Run a step, on any device, and count this rank's operations and the memory that lasts through it.

    The optimizer's state is that of the formulas; and so are the activations of FSDP2 and of pipelines, which are
    estimates: gathered weights and buffers between stages come and go as torch schedules them. Gradients are averaged
    over the mesh of data-parallel ``copies``.
    """
    parameters = sum(local_part(p).nbytes for p in step.model.parameters())
    if isinstance(step, InferencePass):
        with torch.no_grad(), Ledger() as ledger:  # not inference mode: see `Ledger`
            held = step.forward()
        return ledger, Memory(parameters, gradients=0, optimizer=0, activations=sum(local_part(t).nbytes for t in held))
    memory = shape.memory
    with Ledger() as ledger:
        if shape.splits_work:
            memory = replace(memory, activations=saved_activation_bytes(step))
        else:
            step.run()
        with ledger.phase("sync"):
            step.finish()
            average_gradients(step.model, copies)
    gradients = sum(local_part(p.grad).nbytes for p in step.model.parameters() if p.grad is not None)
    return ledger, replace(memory, parameters=parameters, gradients=gradients)


def memory_differences(shape: Shape, counted: Memory) -> list[str]:
    """Where the formulas' memory and the counted one differ."""
    expected = asdict(shape.memory)
    return [
        f"memory of {name}: predicted {expected[name]}, counted {size}"
        for name, size in asdict(counted).items()
        if size != expected[name]
    ]


@contextmanager
def fake_ranks(shape: Shape) -> Iterator[tuple[DeviceMesh | None, DeviceMesh | None]]:
    """The data-parallel and the model mesh of rank ``shape.rank`` in a process group whose other ranks do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    dist.init_process_group("fake", store=FakeStore(), rank=shape.rank, world_size=shape.ranks * shape.pp * shape.dp)
    try:
        _clear_sharding_prop_cache()  # in which the meshes of two ranks are equal
        yield meshes_of(shape)
    finally:
        dist.destroy_process_group()


def meshes_of(shape: Shape) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """The data-parallel and the model mesh of this rank of the process group; None where they would have one rank."""
    mesh = make_mesh("cpu", shape.ranks, shape.dp, shape.pp)
    model = mesh[STAGES] if shape.pp > 1 else mesh["tp"] if shape.ranks > 1 else None
    return (mesh["dp"] if shape.dp > 1 else None), model


class FusedAttention(TorchFunctionMode, ContextDecorator):
    """Attention on meta tensors by the kernel that processors use, where torch would fall back to single products."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            return _Attention.apply(*args[:3], kwargs.get("is_causal", False))
        return function(*args, **kwargs)


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


def differences(shape: Shape, ledger: Ledger, *, native: bool, root: str = "FFN") -> list[str]:
    """Where formulas and ledger differ, each line naming the term; empty where they agree.

    Products are compared by phase, layer and size, those of a fused kernel by the sum of their FLOPs; exchanges by
    phase, op, ranks, their distance and bytes. ``native``: whether the ranks exchange by all-gather and reduce-scatter,
    and not by all-to-all. ``root`` is the class of the model.
    """
    predicted, counted = Counter[Key](), Counter[Key]()
    terms: dict[Key, list[str]] = {}
    parts = {f"{root}.{layer.name}" for layer in shape.costs}

    def predict(key: Key, amount: int, term: str) -> None:
        predicted[key] += amount
        terms.setdefault(key, []).append(term)

    def module_of(module: str) -> str:
        """The part that a module is, or is within; a module in no part is left as it is."""
        if shape.interleave > 1 or getattr(shape.model, "ladder", False):
            return "the model"  # interleaved parts and those of a ladder run outside modules
        name = module
        while name and name not in parts:
            name = name.rpartition(".")[0]
        return name or module

    for layer in shape.costs:
        module = module_of(f"{root}.{layer.name}")
        for p in layer.products:
            key = ("FLOPs", p.phase, module) if layer.fused else _product_key(p, module)
            predict(key, layer.calls * (p.flops if layer.fused else 1), f"{p.term} of {layer.name}")
    for e in shape.exchanges:
        predict(("exchange", e.phase, _op(e, native), e.ranks, e.stride, e.moved_bytes(shape.word_bytes)), 1, e.term)
    for product, count in ledger.products.items():
        module, fused = module_of(product.module), not product.batch
        key = ("FLOPs", product.phase, module) if fused else _product_key(product, module)
        counted[key] += count * (product.flops if fused else 1)
    for c, count in ledger.collectives.items():
        counted["exchange", c.phase, c.op, c.ranks, c.stride, c.moved] += count
    wrong = [
        f"{key[0]} {' and '.join(names)} {key[1:]}: predicted {predicted[key]}, counted {counted[key]}"
        for key, names in terms.items()
        if predicted[key] != counted[key]
    ]
    return wrong + [f"{key[0]} {key[1:]}: counted {n}, in no formula" for key, n in counted.items() if key not in terms]


def _op(exchange: Exchange, native: bool) -> str:
    """The operation that an exchange is, where gathers and scatters are ``native`` or built from all-to-all."""
    built = not native and exchange.op in ("all_gather", "reduce_scatter") and not exchange.by_torch
    return "all_to_all" if built else exchange.op


Key = tuple[str | int, ...]


def _product_key(p: Product | ProductEntry, module: str) -> Key:
    """A product and its transpose are the same work."""
    return "product", p.phase, module, p.batch, p.inner, min(p.rows, p.columns), max(p.rows, p.columns)


def saved_activation_bytes(step: TrainingStep) -> int:
    """Run both passes of a step, and return the bytes that autograd has saved for backward after forward.

    Each storage counts once, and the weights' do not. Modules that are recomputed keep their first argument.
    """
    alive: list[weakref.ref[Any]] = []

    def pack(tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        alive.append(weakref.ref(saved))
        return saved

    def keep_input(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        alive.append(weakref.ref(arguments[0]))

    with ExitStack() as hooks:
        for module in step.recomputed:
            hooks.callback(module.register_forward_pre_hook(keep_input).remove)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            loss = step.loss()
    held = [entry for reference in alive if (entry := reference()) is not None]
    storages = [local_part(each.tensor if isinstance(each, _Saved) else each).untyped_storage() for each in held]
    weights = {local_part(each).untyped_storage()._cdata for each in (*step.model.parameters(), *step.constants)}
    sizes = {storage._cdata: storage.nbytes() for storage in storages}
    total = sum(size for key, size in sizes.items() if key not in weights)
    del held
    loss.backward()
    return total


class _Saved:
    """What autograd holds in place of a tensor, until backward has used it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


PHASES = ("prefill", "decode", "forward", "backward", "sync")


@dataclass(frozen=True)
class Messages:
    """All messages of one operation and size in one phase, on one rank.

    ``message_bytes`` is the rank's input to each of them, ``sent_bytes`` what it must send for all of them (see
    `cost.terms`). ``carries`` names the terms of the equations, and the parts they belong to. ``stride`` is the
    distance of one rank of the group to the next.
    """

    phase: str
    operation: str
    ranks: int
    stride: int
    message_bytes: int
    count: int
    sent_bytes: int
    carries: str


def profile(shape: Shape) -> list[Messages]:
    """The messages of a training step by the formulas, after those of each pass of inference that the model has."""
    groups: dict[tuple[str, str, int, int, int], list[tuple[str, int]]] = {}  # what each message carries, and its bytes
    for mode, step in shape.passes().items():
        exchanges = [(part.name.rpartition(".")[2], e) for part in step.costs for e in part.exchanges * part.calls]
        exchanges += [("", e) for e in (*step.model_exchanges, *step.copies_exchanges)]
        for part, e in exchanges:
            term = f"{e.term} of {'layers' if part.isdigit() else part}" if part else e.term
            phase = e.phase if mode == "train" else mode
            key = phase, e.op, e.ranks, e.stride, e.message_bytes(shape.word_bytes)
            groups.setdefault(key, []).append((term, e.moved_bytes(shape.word_bytes)))
    rows = [
        Messages(*key, len(sent), sum(size for _, size in sent), "; ".join(dict(sent))) for key, sent in groups.items()
    ]
    return sorted(rows, key=lambda row: (PHASES.index(row.phase), row.operation, row.message_bytes))


def layouts(shape: Shape, baseline: StrategyName) -> dict[str, Shape]:
    """A pass of inference on as many ranks: by the strategy of ``shape``, by the baseline, by a pipeline, and by stages
    of several ranks, which are modelled only (``phantom 4x2``: two stages of four ranks). Those that do not divide the
    model are left out.
    """
    ranks, made = shape.ranks, dict[str, Shape]()
    strategies: tuple[StrategyName, ...] = (shape.strategy, baseline, "pipeline")
    for stages in (stages for stages in range(1, ranks) if ranks % stages == 0):
        for strategy in dict.fromkeys(strategies):
            if stages > 1 and not get_strategy(strategy).splits_layers:
                continue
            cut = {"ranks": ranks // stages, "rank": 0} | ({"pp": stages} if stages > 1 else {})
            name = f"{strategy} {ranks // stages}x{stages}" if strategy != "pipeline" else f"pipeline 1x{ranks}"
            with suppress(ValueError):
                same = strategy == shape.strategy
                made[name] = shape.updated(**cut) if same else shape.with_strategy(strategy, **cut)
    return made


def exchange_counts(shape: Shape, *, native: bool) -> dict[str, int]:
    """Exchanges of a rank by the formulas, by operation and the bytes that it sends; ``native`` as in `differences`."""
    sent = ((_op(e, native), e.moved_bytes(shape.word_bytes)) for e in shape.exchanges)
    return dict(Counter(f"{op} {size:,} B" for op, size in sent))


def exchanges_in_turn(shape: Shape) -> int:
    """Exchanges of a pass that follow one another: those of one rank, or of one rank of every stage."""
    if shape.stage is None:
        return len(list(shape.exchanges))
    stages = [replace(shape, rank=index * shape.stage.ranks) for index in range(shape.stage.stages)]
    ops = Counter(exchange.op for stage in stages for exchange in stage.exchanges)
    return ops.total() - max(0, ops["broadcast"] - 1)  # which all stages share
