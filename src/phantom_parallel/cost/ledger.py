"""The ledger: what running code really computes and sends, on this rank.

``with Ledger() as ledger:`` around any code records every matrix product and every collective, by operation, phase and
module. Plain tensors and DTensors are counted the same way, by what this rank does: a DTensor's operation is let
through to the local products and collectives that it consists of, and those are counted. Under a ledger every operation
passes through Python; without one there is nothing.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
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

from phantom_parallel.cost.terms import bytes_within

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
    """A collective as it was issued. ``moved`` is the bytes that this rank sends, ``message`` those it hands in;
    ``stride`` is the distance of one rank of its group to the next.
    """

    phase: str
    module: str
    op: str
    ranks: int
    message: int
    moved: int
    stride: int = 1

    def moved_within(self, near: int) -> int:
        """Bytes that this rank sends within its own ``near`` consecutive ranks."""
        return bytes_within(self.moved, self.ranks, self.stride, near)


class Ledger(TorchDispatchMode):
    """Records FLOPs and communicated bytes of everything that runs within, on this rank.

    With gradients, without, and in inference mode the same is counted; but in inference mode DTensor chooses layouts by
    other rules, so that what it runs may itself be more than without gradients.

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
        self._named: list[str] = []
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
        if any(issubclass(kind, FakeTensor) for kind in types) and not self._is_own(args):
            return result  # DTensor asking for the shape of a whole result
        packet = _SAME_AS.get(func._overloadpacket, func._overloadpacket)
        if packet in flop_registry:
            self._book_product(packet, args, kwargs, result)
        elif func.namespace in ("_c10d_functional", "c10d", "_dtensor"):
            self._book_collective(func, args)
        return result

    def _is_own(self, args: Any) -> bool:
        """Whether fake tensors are those of a program that runs without data, as in a dry run."""
        if self._fake_mode is None:
            return False
        return all(leaf.fake_mode is self._fake_mode for leaf in tree_leaves(args) if isinstance(leaf, FakeTensor))

    def _book_product(self, packet: Any, args: Any, kwargs: Any, result: Any) -> None:
        flops = flop_registry[packet](*args, **kwargs, out_val=result)
        if flops:
            shape = _product_shape(packet.__name__, args)
            self.products[ProductEntry(self._phase(), self._module(), packet.__name__, *shape, flops)] += 1

    def _book_collective(self, func: Any, args: Any) -> None:
        collective = collective_of(func, args)
        if collective is not None:
            backward = collective.op == "send" and sends_back(args)
            self.collectives[CollectiveEntry(self._phase(backward), self._module(), *collective)] += 1

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
        return sum(
            (e.moved if near is None else e.moved_within(near)) * count
            for e, count in self.collectives.items()
            if _within(e, phase, module)
        )

    @property
    def flops(self) -> int:
        return self.flops_of()

    @property
    def moved_bytes(self) -> int:
        return self.moved_of()

    def message_sizes(self) -> dict[int, int]:
        """How many collectives handed in messages of up to so many bytes: a histogram by powers of two."""
        sizes: Counter[int] = Counter()
        for entry, count in self.collectives.items():
            sizes[up_to(entry.message)] += count
        return dict(sorted(sizes.items()))

    def table(self) -> Table:
        """Operations by phase, for printing with rich."""
        table = Table("phase", "operation", "calls", "GFLOP", "bytes sent", title="This rank's ledger")
        for alignment in table.columns[2:]:
            alignment.justify = "right"
        rows: dict[tuple[str, str], list[int]] = {}
        for product, count in self.products.items():
            row = rows.setdefault((product.phase, product.op), [0, 0, 0])
            row[0] += count
            row[1] += product.flops * count
        for collective, count in self.collectives.items():
            row = rows.setdefault((collective.phase, collective.op), [0, 0, 0])
            row[0] += count
            row[2] += collective.moved * count
        for (phase, op), (calls, flops, moved) in rows.items():
            table.add_row(
                phase, op, f"{calls:,}", f"{flops / 1e9:,.3f}" if flops else "", f"{moved:,}" if moved else ""
            )
        table.add_section()
        table.add_row("all", "", "", f"{self.flops / 1e9:,.3f}", f"{self.moved_bytes:,}")
        return table

    def tree(self, depth: int | None = None) -> str:
        """Products, FLOPs, collectives and sent bytes of each module, with those of the modules within it.

        What ran outside of all modules, such as the averaging of gradients, is in the first line only.

        Args:
            depth: How many levels of modules to show; by default all.
        """
        totals = self._totals()
        columns = ("module", "products", "FLOPs", "share", "collectives", "bytes sent")
        rows: list[tuple[str, ...]] = [columns]
        for path, branch in _drawn(list(totals), (), depth):
            products, flops, collectives, moved = totals[path]
            share = f"{flops / max(self.flops, 1):.1%}"
            name = path[-1] if path else "this rank"
            rows.append((branch + name, f"{products:,}", f"{flops:,}", share, f"{collectives:,}", f"{moved:,}"))
        widths = [max(len(row[column]) for row in rows) for column in range(len(columns))]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        )

    def __str__(self) -> str:
        return self.tree()

    def _totals(self) -> dict[tuple[str, ...], list[int]]:
        """Products, FLOPs, collectives and bytes of each module by its path, those within it included."""
        totals: dict[tuple[str, ...], list[int]] = {(): [0, 0, 0, 0]}
        entries: list[tuple[str, tuple[int, int, int, int]]] = [
            *((e.module, (count, e.flops * count, 0, 0)) for e, count in self.products.items()),
            *((e.module, (0, 0, count, e.moved * count)) for e, count in self.collectives.items()),
        ]
        for module, added in entries:
            path = tuple(module.split(".")) if module else ()
            for end in range(len(path) + 1):
                total = totals.setdefault(path[:end], [0, 0, 0, 0])
                total[:] = [a + b for a, b in zip(total, added, strict=True)]
        return totals

    def to_dict(self) -> dict[str, Any]:
        """Every entry with its count, the sums and the histogram; ready for JSON."""
        return {
            "flops": self.flops,
            "moved_bytes": self.moved_bytes,
            "message_sizes": {str(size): count for size, count in self.message_sizes().items()},
            "products": [asdict(entry) | {"count": count} for entry, count in self.products.items()],
            "collectives": [asdict(entry) | {"count": count} for entry, count in self.collectives.items()],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)


def up_to(message: int) -> int:
    """The power of two that a message of so many bytes is counted under."""
    return 1 << max(message - 1, 0).bit_length()


def _drawn(
    paths: list[tuple[str, ...]], path: tuple[str, ...], depth: int | None, first: str = "", further: str = ""
) -> Iterator[tuple[tuple[str, ...], str]]:
    """A path and those below it in the order of a tree, each with the lines to draw before its name."""
    yield path, first
    within = [child for child in paths if len(child) == len(path) + 1 and child[:-1] == path]
    if depth == 0:
        return
    for child in within:
        branch, trunk = ("└─ ", "   ") if child == within[-1] else ("├─ ", "│  ")
        yield from _drawn(paths, child, None if depth is None else depth - 1, further + branch, further + trunk)


@cache
def _is_composite(func: Any) -> bool:
    """Whether an operation only consists of others, and is none that the counter knows as a whole."""
    if func._overloadpacket in flop_registry:
        return False
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def _within(entry: ProductEntry | CollectiveEntry, phase: str | None, module: str | None) -> bool:
    if phase is not None and entry.phase != phase:
        return False
    return module is None or entry.module == module or entry.module.startswith(module + ".")


def _product_shape(op: str, args: Any) -> tuple[int, int, int, int]:
    if op not in ("mm", "addmm", "bmm", "baddbmm"):
        return 0, 0, 0, 0
    a, b = args[-2:] if op in ("mm", "bmm") else args[1:3]
    return (a.shape[0] if a.dim() == 3 else 1), a.shape[-2], a.shape[-1], b.shape[-1]


# Operations that move nothing, or are the other half of one that was counted.
_SILENT = ("wait_tensor", "barrier", "monitored_barrier_", "recv_", "recv_any_source_", "_wrap_tensor_autograd")

_KINDS = {
    "all_gather": ("all_gather_into_tensor", "allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_"),
    "reduce_scatter": (
        "reduce_scatter_tensor",
        "reduce_scatter_",
        "_reduce_scatter_base_",
        "reduce_scatter_tensor_coalesced_",
    ),
    "all_reduce": ("all_reduce", "allreduce_", "allreduce_coalesced_"),
    "all_to_all": ("all_to_all_single", "alltoall_", "alltoall_base_", "shard_dim_alltoall"),
    "broadcast": ("broadcast", "broadcast_"),
    "reduce": ("reduce_",),
    "gather": ("gather_",),
    "scatter": ("scatter_",),
    "send": ("send",),
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}


class Collective(NamedTuple):
    """An op, over how many ranks, the bytes that this rank hands in and the bytes that it sends; ``stride`` is the
    distance of one rank of the group to the next.
    """

    op: str
    ranks: int
    message: int
    moved: int
    stride: int = 1


def collective_of(func: Any, args: Any) -> Collective | None:
    """What ``func(*args)`` moves, or None for operations that move nothing."""
    name = func._overloadpacket.__name__.removesuffix("_coalesced").removesuffix("_out")
    if name in _SILENT or not any(isinstance(leaf, Tensor) for leaf in tree_leaves(args)):
        return None
    kind = _KIND_OF.get(name) or _KIND_OF.get(name.removesuffix("_"))
    if kind is None:
        return None
    members, message = dist.get_process_group_ranks(_group(args)), _bytes(_handed_in(func.namespace, name, args))
    ranks, stride = len(members), members[1] - members[0] if len(members) > 1 else 1
    return Collective(kind, ranks, message, _moved(kind, ranks, message), stride)


def sends_back(args: Any) -> bool:
    """Whether ``c10d.send(*args)`` sends to a lower rank: the stages of a pipeline send gradients so."""
    return bool(args[2] < dist.get_rank(_group(args)))


def _moved(kind: str, ranks: int, message: int) -> int:
    if kind == "all_gather":
        return (ranks - 1) * message
    if kind == "all_reduce":
        return -(-2 * (ranks - 1) * message // ranks)
    if kind in ("reduce_scatter", "all_to_all", "scatter"):
        return (ranks - 1) * message // ranks
    return message  # broadcast, reduce, gather, send: a rank passes on what it has once


def _handed_in(namespace: str, name: str, args: Any) -> Any:
    """The argument that holds the input: the second for c10d's operations that are given their output first."""
    takes_output_first = ("allgather", "reduce_scatter", "alltoall", "gather_", "scatter_")
    second = namespace == "c10d" and name.lstrip("_").startswith(takes_output_first)
    return args[1] if second else args[0]


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(tensors) if isinstance(t, Tensor))


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
