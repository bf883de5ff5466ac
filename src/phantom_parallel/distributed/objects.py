"""Python objects between ranks: gathering, broadcasting, errors that all ranks raise together, and agreement.

Objects are plain data: numbers, strings, bytes, containers of such, paths, tensors, enums, and dataclasses and named
tuples of this package. They are encoded with msgpack, and nothing that arrives is unpickled or imported: a message can
only become such an object.
"""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from phantom_parallel.distributed.signals import Interrupted, LossDiverged

T = TypeVar("T")
Group = DeviceMesh | dist.ProcessGroup | None
_TAG, _CONTENT = "!", "of"  # keys of what stands for an object that msgpack does not have


class RanksDisagree(ValueError):
    """Ranks that share a layer were given different arguments for it."""


# Types that an error keeps on its way to other ranks and to the launcher, subclasses first.
_ERRORS = {
    kind.__name__: kind for kind in (FileExistsError, OSError, RanksDisagree, ValueError, Interrupted, LossDiverged)
}


def all_gather_objects(value: T, group: Group) -> list[T]:
    """Gather an object from each rank of ``group``, in the order of ranks; None is this process alone.

    Ranks of a ``fake`` process group all hold the same object.
    """
    if group is None:
        return [value]
    group = process_group_of(group)
    size = dist.get_world_size(group)
    if size == 1 or dist.get_backend(group) == "fake":
        return [value] * size
    device = dist.distributed_c10d._get_object_coll_device(group)  # the CPU, where possible
    message = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8).to(device)
    lengths = [torch.zeros_like(message[:1], dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, lengths[0].new_tensor([len(message)]), group=group)
    longest = max(int(length) for length in lengths)
    messages = [message.new_empty(longest) for _ in range(size)]
    dist.all_gather(messages, torch.cat([message, message.new_zeros(longest - len(message))]), group=group)
    return [
        decode(message[: int(length)].cpu().numpy().tobytes())
        for message, length in zip(messages, lengths, strict=True)
    ]


def barrier(group: Group) -> None:
    """Wait for all ranks of ``group``; None is this process alone. Ranks of a ``fake`` process group do not wait."""
    if group is None:
        return
    group = process_group_of(group)
    if dist.get_world_size(group) > 1 and dist.get_backend(group) != "fake":
        dist.barrier(group)


def broadcast_from_rank_zero(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call ``work`` on the first rank of ``group`` and return its result on every rank.

    ValueError and OSError raised by it are raised on every rank. By default the group is all ranks; without a process
    group, this process alone.
    """
    if not dist.is_initialized():
        return work()
    group = dist.distributed_c10d._get_default_group() if group is None else group
    result, error, first = None, None, dist.get_rank(group) == 0
    if first:
        try:
            result = work()
        except (ValueError, OSError) as raised:
            error = raised
    raise_on_all_ranks(error, group)
    return all_gather_objects(result, group)[0]  # type: ignore[return-value]


def raise_on_all_ranks(error: Exception | None, group: Group) -> None:
    """Raise the error of any rank of ``group`` on every rank of it: that of the first rank that has one.

    Every rank calls this, with its own error or None, so that no rank waits for another one that gave up. On other
    ranks an error is rebuilt from its message: as a ValueError, an OSError, or else a RuntimeError.
    """
    errors = all_gather_objects(None if error is None else describe_error(error), group)
    first = next((rank for rank, description in enumerate(errors) if description is not None), None)
    if first is not None:
        own = group is None or dist.get_rank(process_group_of(group)) == first
        raise error if own and error is not None else rebuild_error(*errors[first])  # type: ignore[misc]


def describe_error(error: BaseException) -> tuple[str, tuple[Any, ...]]:
    """Type and arguments of an error, for `rebuild_error`."""
    if isinstance(error, OSError) and error.errno:
        return "OSError", (error.errno, error.strerror, error.filename)  # whose subclass follows from the number
    name = next((name for name, kind in _ERRORS.items() if isinstance(error, kind)), "RuntimeError")
    return name, (str(error),)


def rebuild_error(kind: str, arguments: tuple[Any, ...]) -> Exception:
    """An error that another process has described."""
    return _ERRORS.get(kind, RuntimeError)(*arguments)


def check_agreement(subject: str, settings: dict[str, Any], group: Group) -> None:
    """Compare ``settings`` over the ranks of ``group``, before a difference becomes a hang or a wrong result.

    Values are compared by their representation.

    Raises:
        RanksDisagree: On every rank, naming the ranks that differ from the majority; without a majority, as of two
            ranks, nobody can say who is right, and all are named.
    """
    if group is None or group.size() == 1:
        return
    gathered = all_gather_objects({name: repr(value) for name, value in settings.items()}, group)
    ranks = dist.get_process_group_ranks(process_group_of(group))
    parts: list[str] = []
    for name in sorted({name for each in gathered for name in each}):
        values = [each.get(name, "nothing") for each in gathered]
        usual, count = Counter(values).most_common(1)[0]
        majority = 2 * count > len(values)
        parts += [
            f"rank {rank} has {name}={value}" + (f", the others {usual}" if majority else "")
            for rank, value in zip(ranks, values, strict=True)
            if not (majority and value == usual)
        ]
    if parts:
        raise RanksDisagree(f"ranks disagree on {subject}: {'; '.join(parts)}")


def process_group_of(group: DeviceMesh | dist.ProcessGroup) -> dist.ProcessGroup:
    """The process group of all ranks of a mesh, or the group itself."""
    if isinstance(group, DeviceMesh):
        return group.get_group() if group.ndim == 1 else group._flatten().get_group()
    return group


def refuse_pickles() -> None:
    """Let torch's own object collectives raise in this process instead of unpickling what arrives: gloo and NCCL accept
    connections from any process that can reach them.
    """
    c10d: Any = dist.distributed_c10d
    for name in ("_pickler", "_unpickler"):  # torch's own places for other picklers
        assert hasattr(c10d, name)
        setattr(c10d, name, _refuse)


def _refuse(file: object) -> Any:
    raise RuntimeError("objects between ranks are not pickled: use phantom_parallel.distributed.objects")


def encode(value: Any) -> bytes:
    """A plain object as bytes.

    Raises:
        TypeError: If it is not plain data.
    """
    return msgspec.msgpack.encode(_plain(value))


def decode(message: bytes) -> Any:
    """The object that `encode` was given.

    Raises:
        RuntimeError: If the message is of something else: another process may have connected to this rank.
    """
    try:
        return _rebuilt(msgspec.msgpack.decode(message))
    except msgspec.DecodeError as error:
        raise RuntimeError(f"a message was received that no rank of this launch has sent: {error}") from None


def _plain(value: Any) -> Any:
    """What msgpack has: others become dictionaries with a tag."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes):
        return value
    if kind is list:
        return [_plain(entry) for entry in value]
    if kind is dict and _TAG not in value and all(type(key) is str for key in value):
        return {key: _plain(entry) for key, entry in value.items()}
    for base in (int, float, str):  # such as a NumPy number
        if isinstance(value, base) and not isinstance(value, Enum):
            return base(value)
    tag, content = _tagged(value)
    return {_TAG: tag, _CONTENT: _plain(content)}


def _tagged(value: Any) -> tuple[str, Any]:
    """The tag of an object, and what it is made of."""
    kind = type(value)
    if isinstance(value, dict):
        return "dict", [list(item) for item in value.items()]
    if isinstance(value, Enum):
        return _name(kind), value.name
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _name(kind), {name: getattr(value, name) for name in value._fields}
    if is_dataclass(value):
        return _name(kind), {field.name: getattr(value, field.name) for field in fields(value) if field.init}
    if isinstance(value, (tuple, set, frozenset)):
        return next(base.__name__ for base in (tuple, set, frozenset) if isinstance(value, base)), list(value)
    if isinstance(value, Path):
        return "path", str(value)
    if isinstance(value, Tensor):
        values = value.detach().cpu().contiguous()
        data = values.reshape(-1).view(torch.uint8).numpy().tobytes()
        return "tensor", [str(values.dtype), list(values.shape), data]
    raise TypeError(f"ranks exchange plain data, not {kind.__module__}.{kind.__qualname__}")


def _tensor(content: tuple[str, list[int], bytes]) -> Tensor:
    name, shape, data = content
    dtype = getattr(torch, name.removeprefix("torch."))
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


_REBUILD: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "path": Path,
    "tensor": _tensor,
}


def _rebuilt(value: Any) -> Any:
    """What `_plain` was given."""
    if isinstance(value, list):
        return [_rebuilt(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _rebuilt(entry) for key, entry in value.items()}
    tag, content = value[_TAG], _rebuilt(value[_CONTENT])
    if tag in _REBUILD:
        return _REBUILD[tag](content)
    kind = _class(tag)
    return kind[content] if issubclass(kind, Enum) else kind(**content)


def _name(kind: type) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    _class(name)
    return name


def _class(name: str) -> Any:
    """A dataclass, named tuple or enum of this package that has been imported already."""
    module, _, path = name.partition(":")
    kind: Any = sys.modules.get(module)
    for part in path.split("."):
        kind = getattr(kind, part, None)
    plain = isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "_fields") or issubclass(kind, Enum))
    if not plain or module.partition(".")[0] != __name__.partition(".")[0]:
        raise TypeError(f"ranks exchange plain data, not {name}")
    return kind
