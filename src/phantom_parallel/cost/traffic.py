"""What a collective moves: from torch's operation and its arguments to an op, a number of ranks and bytes.

Covers the functional collectives (``_c10d_functional``), those that ``torch.distributed`` and FSDP2 issue (``c10d``)
and DTensor's own. Bytes moved are those that a rank must send, whatever the algorithm; `cost.terms` has the table.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._pytree import tree_leaves

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
