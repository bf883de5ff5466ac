"""The ledger: what running code really computes and sends, on this rank.

``with Ledger() as ledger:`` around any code records every matrix product and every collective, by operation, phase and
module. Plain tensors and DTensors are counted the same way, by what this rank does: a DTensor's operation is let
through to the local products and collectives that it consists of, and those are counted. Under a ledger every operation
passes through Python; without one there is nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Self

import torch
import torch.distributed as dist
from rich.box import SIMPLE
from rich.table import Table
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.module_tracker import ModuleTracker

from phantom_parallel.cost.terms import bytes_sent, bytes_within

_aten = torch.ops.aten
# Operations that torch's own counter passes over, and those it knows that do the same work.
_SAME_AS = {
    _aten.addmm_: _aten.addmm,
    _aten.baddbmm_: _aten.baddbmm,
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}


@dataclass(frozen=True)
class ProductEntry:
    """A product as it ran: batch, (rows, inner) times (inner, columns); 0s where it is another kind of operation."""

    phase: str
    module: str
    op: str
    batch: int
    rows: int
    inner: int
    columns: int
    flops: int


@dataclass(frozen=True)
class CollectiveEntry:
    """A collective as it was issued. ``moved`` is the bytes that this rank sends, ``message`` those of its input;
    ``stride`` is the distance of one rank of its group to the next.
    """

    phase: str
    module: str
    op: str
    ranks: int
    message: int
    moved: int
    stride: int = 1


Entry = ProductEntry | CollectiveEntry
Sums = tuple[int, int, int, int]  # products, FLOPs, collectives, bytes sent


class Ledger(TorchDispatchMode):
    """Records FLOPs and communicated bytes of everything that runs within, on this rank.

    In inference mode DTensor chooses layouts by other rules, so that what it runs may be more than without gradients.
    Compiled code runs kernels of its own, which are not seen: count the model uncompiled, its work is the same.

    Phases are ``forward`` and ``backward``, or within ``ledger.phase("decode")`` the user's own. What is sent to a
    lower rank is backward, since pipelines send gradients so. Modules are named as in ``named_modules``, after the
    class of the outermost one.

    Example::

        with Ledger() as ledger:
            model(x).sum().backward()
        print(ledger)  # by module
        print(ledger.flops, ledger.moved_bytes)
        rich.print(ledger.table())  # by operation
    """

    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[ProductEntry] = Counter()
        self.collectives: Counter[CollectiveEntry] = Counter()
        self._named: list[str] = []  # phases of the user's own
        self._fake_mode: Any = None  # in which the ledger is entered: its tensors are the program's own
        self._tracker = ModuleTracker()

    def __enter__(self) -> Self:
        self._fake_mode = active_fake_mode()
        self._tracker.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._tracker.__exit__(*error)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute everything in this block to phase ``name``."""
        self._named.append(name)
        try:
            yield
        finally:
            self._named.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then breaks it up into what this rank does, and that comes back here
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a fake tensor's device
            return func(*args, **kwargs)
        if _is_composite(func):  # in inference mode these arrive whole, otherwise in their parts
            super().__enter__()
            try:
                return func.decompose(*args, **kwargs)
            finally:
                super().__exit__(None, None, None)
        result = func(*args, **kwargs)
        if any(issubclass(kind, FakeTensor) for kind in types):  # a dry run's own, or DTensor's for a whole result
            fake = [leaf for leaf in tree_leaves(args) if isinstance(leaf, FakeTensor)]
            if self._fake_mode is None or any(leaf.fake_mode is not self._fake_mode for leaf in fake):
                return result
        packet = _SAME_AS.get(func._overloadpacket, func._overloadpacket)
        if packet in flop_registry:
            if flops := flop_registry[packet](*args, **kwargs, out_val=result):
                shape = _product_shape(packet.__name__, args)
                self.products[ProductEntry(self._phase(), self._module(), packet.__name__, *shape, flops)] += 1
        elif func.namespace in ("_c10d_functional", "c10d", "_dtensor", "phantom_parallel"):
            self._book_collective(func, args)
        return result

    def _book_collective(self, func: Any, args: Any) -> None:
        name = func._overloadpacket.__name__.replace("_", "").removeprefix("sharddim")
        op = next((op for op in _OPS if name.startswith(op.replace("_", ""))), None)
        if op is None:
            return
        group = _group(args)
        members = dist.get_process_group_ranks(group)
        ranks, stride = len(members), members[1] - members[0] if len(members) > 1 else 1
        # c10d's operations that have an output apart from the input are given it first.
        output_first = func.namespace == "c10d" and op not in ("all_reduce", "broadcast", "reduce", "send")
        inputs = tree_leaves(args[1] if output_first else args[0])
        message = sum(tensor.numel() * tensor.element_size() for tensor in inputs if isinstance(tensor, Tensor))
        backward = op == "send" and args[2] < dist.get_rank(group)  # stages of a pipeline send gradients to lower ranks
        sizes = ranks, message, bytes_sent(op, ranks, message), stride
        self.collectives[CollectiveEntry(self._phase(backward), self._module(), op, *sizes)] += 1

    def _phase(self, backward: bool = False) -> str:
        if self._named:
            return self._named[-1]
        return "backward" if backward or torch._C._current_graph_task_id() != -1 else "forward"

    def _module(self) -> str:
        return max((name for name in self._tracker.parents if name != "Global"), key=len, default="")

    def flops_of(self, phase: str | None = None, module: str | None = None) -> int:
        """FLOPs, two a multiply-add, of a phase, of a module and those within it, or of all."""
        return sum(e.flops * count for e, count in self.products.items() if _within(e, phase, module))

    def moved_of(self, phase: str | None = None, module: str | None = None, *, near: int | None = None) -> int:
        """Bytes that this rank sends, of a phase, of a module and those within it, or of all.

        ``near``: only what it sends within its own ``near`` consecutive ranks, such as those of one block or node.
        """
        entries = [(e, count) for e, count in self.collectives.items() if _within(e, phase, module)]
        return sum(bytes_within(e.moved, e.ranks, e.stride, near) * count for e, count in entries)

    @property
    def flops(self) -> int:
        return self.flops_of()

    @property
    def moved_bytes(self) -> int:
        return self.moved_of()

    def table(self) -> Table:
        """Operations by phase, for printing with rich."""
        frame: Any = {"box": SIMPLE, "padding": (0, 1, 0, 0), "show_edge": False, "pad_edge": False}
        table = Table("phase", title="This rank's ledger", title_justify="left", **frame)
        table.add_column("operation", overflow="fold")
        for heading in ("calls", "GFLOP", "bytes sent"):
            table.add_column(heading, justify="right", no_wrap=True)
        sums = self._sums(lambda entry: [(entry.phase, entry.op)])
        for (phase, op), (products, flops, collectives, moved) in sums.items():
            counts = f"{flops / 1e9:,.3f}" if flops else "", f"{moved:,}" if moved else ""
            table.add_row(phase, op, f"{products + collectives:,}", *counts)
        table.add_section()
        table.add_row("all", "", "", f"{self.flops / 1e9:,.3f}", f"{self.moved_bytes:,}")
        return table

    def __str__(self) -> str:
        """Products, FLOPs, collectives and sent bytes of each module, with those of the modules within it. What ran
        outside of all modules is in the first line only.
        """

        def paths(entry: Entry) -> list[tuple[str, ...]]:
            path = tuple(entry.module.split(".")) if entry.module else ()
            return [path[:end] for end in range(len(path) + 1)]

        sums = {(): (0, 0, 0, 0)} | self._sums(paths)
        places = {path: place for place, path in enumerate(sums)}
        lines = [f"{'module':<40}{'products':>10}{'FLOPs':>24}{'share':>8}{'collectives':>13}{'bytes sent':>20}"]
        for path in sorted(sums, key=lambda path: [places[path[: end + 1]] for end in range(len(path))]):
            products, flops, collectives, moved = sums[path]
            name, share = "  " * len(path) + (path[-1] if path else "this rank"), flops / max(self.flops, 1)
            lines.append(f"{name:<40}{products:>10,}{flops:>24,}{share:>8.1%}{collectives:>13,}{moved:>20,}")
        return "\n".join(lines)

    def _sums(self, keys: Callable[[Entry], Iterable[tuple[str, ...]]]) -> dict[tuple[str, ...], Sums]:
        """What was counted, by keys of entries."""
        sums: dict[tuple[str, ...], Sums] = {}
        counts: list[tuple[Entry, Sums]] = [(e, (n, e.flops * n, 0, 0)) for e, n in self.products.items()]
        counts += [(e, (0, 0, n, e.moved * n)) for e, n in self.collectives.items()]
        for entry, own in counts:
            for key in keys(entry):
                sums[key] = tuple(map(sum, zip(sums.get(key, (0, 0, 0, 0)), own, strict=True)))  # type: ignore[assignment]
        return sums

    def to_dict(self) -> dict[str, Any]:
        """Every entry with its count, and the sums; ready for JSON."""
        return {
            "flops": self.flops,
            "moved_bytes": self.moved_bytes,
            "products": [asdict(entry) | {"count": count} for entry, count in self.products.items()],
            "collectives": [asdict(entry) | {"count": count} for entry, count in self.collectives.items()],
        }


@cache
def _is_composite(func: Any) -> bool:
    """Whether an operation only consists of others, and is none that the counter knows as a whole."""
    if func._overloadpacket in flop_registry:
        return False
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def _within(entry: Entry, phase: str | None, module: str | None) -> bool:
    if phase is not None and entry.phase != phase:
        return False
    return module is None or entry.module == module or entry.module.startswith(module + ".")


def _product_shape(op: str, args: Any) -> tuple[int, int, int, int]:
    if op not in ("mm", "addmm", "bmm", "baddbmm"):
        return 0, 0, 0, 0
    a, b = args[-2:] if op in ("mm", "bmm") else args[1:3]
    return (a.shape[0] if a.dim() == 3 else 1), a.shape[-2], a.shape[-1], b.shape[-1]


# Names of operations begin with these, but for underscores; others move nothing, or are the other half of a send.
_OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce", "gather", "scatter", "send")


def _group(args: Iterable[Any]) -> dist.ProcessGroup:
    """The group that is named, or is itself, among the arguments."""
    for argument in reversed(list(args)):
        if isinstance(argument, str) and argument not in ("sum", "avg", "max", "min", "product", "premulsum"):
            return _resolve_process_group(argument)  # type: ignore[arg-type]
        if isinstance(argument, dist.ProcessGroup):
            return argument
        if type(argument).__name__ == "ScriptObject" and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument)
    raise ValueError("a collective without a process group")
