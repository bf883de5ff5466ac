"""Python objects between ranks: gathering, broadcasting, errors that all ranks raise together, and agreement.

Objects are plain data: numbers, strings, bytes, containers of such, paths, tensors, enums, and dataclasses and named
tuples of this package. They are encoded with msgpack, and nothing that arrives is unpickled or imported: a message can
only become such an object.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
Group = DeviceMesh | dist.ProcessGroup | None
_TAG = "!"  # key of what stands for an object that msgpack does not have


class RanksDisagree(ValueError):
    """Ranks that share a layer were given different arguments for it."""


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
    message = _message(value, group)
    lengths = [torch.zeros_like(message[:1], dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, lengths[0].new_tensor([len(message)]), group=group)
    longest = max(int(length) for length in lengths)
    messages = [message.new_empty(longest) for _ in range(size)]
    dist.all_gather(messages, torch.cat([message, message.new_zeros(longest - len(message))]), group=group)
    return [_decode(message[: int(length)]) for message, length in zip(messages, lengths, strict=True)]


def barrier(group: Group) -> None:
    """Wait for all ranks of ``group``; None is this process alone. Ranks of a ``fake`` process group do not wait."""
    if group is None:
        return
    group = process_group_of(group)
    if dist.get_world_size(group) > 1 and dist.get_backend(group) != "fake":
        dist.barrier(group)


def broadcast_from_rank_zero(work: Callable[[], T], device: torch.device, group: dist.ProcessGroup | None = None) -> T:
    """Call ``work`` on the first rank of ``group`` and return its result on every rank.

    ValueError and OSError raised by it are raised on every rank. By default the group is all ranks; without a process
    group, this process alone.
    """
    if not dist.is_initialized():
        return work()
    group = dist.distributed_c10d._get_default_group() if group is None else group
    result, error = None, None
    if dist.get_rank(group) == 0:
        try:
            result = work()
        except (ValueError, OSError) as raised:
            error = raised
    message = _message((result, None if error is None else _describe(error)), group)
    length = torch.full_like(message[:1], len(message), dtype=torch.int64)
    dist.broadcast(length, group=group, group_src=0)
    if dist.get_rank(group) > 0:
        message = message.new_empty(int(length))
    dist.broadcast(message, group=group, group_src=0)
    if error is not None:
        raise error
    if dist.get_rank(group) > 0:
        result, description = _decode(message)
        if description is not None:
            raise _error(*description)
    return result  # type: ignore[return-value]


def raise_on_all_ranks(error: Exception | None, group: Group) -> None:
    """Raise the error of any rank of ``group`` on every rank of it: that of the first rank that has one.

    Every rank calls this, with its own error or None, so that no rank waits for another one that gave up. On other
    ranks an error is rebuilt from its message: as a ValueError, an OSError, or else a RuntimeError.
    """
    errors = all_gather_objects(None if error is None else _describe(error), group)
    first = next((rank for rank, description in enumerate(errors) if description is not None), None)
    if first is not None:
        own = group is None or dist.get_rank(process_group_of(group)) == first
        raise error if own and error is not None else _error(*errors[first])  # type: ignore[misc]


def _describe(error: Exception) -> tuple[str, tuple[Any, ...]]:
    """Type and arguments of an error; its subclass is lost, but OSError chooses that by the number of the error."""
    if isinstance(error, OSError) and error.errno:
        return "OSError", (error.errno, error.strerror, error.filename)
    if isinstance(error, OSError):
        return "FileExistsError" if isinstance(error, FileExistsError) else "OSError", (str(error),)
    kinds = {RanksDisagree: "RanksDisagree", ValueError: "ValueError"}
    return next((name for kind, name in kinds.items() if isinstance(error, kind)), "RuntimeError"), (str(error),)


def _error(kind: str, arguments: tuple[Any, ...]) -> Exception:
    kinds = {
        "OSError": OSError,
        "FileExistsError": FileExistsError,
        "RanksDisagree": RanksDisagree,
        "ValueError": ValueError,
    }
    return kinds.get(kind, RuntimeError)(*arguments)


def check_agreement(subject: str, settings: dict[str, Any], group: Group) -> None:
    """Compare ``settings`` over the ranks of ``group``, before a difference becomes a hang or a wrong result.

    Values are compared by their representation.

    Raises:
        RanksDisagree: On every rank, naming the ranks that differ from the majority.
    """
    if group is None or group.size() == 1:
        return
    gathered = all_gather_objects({name: repr(value) for name, value in settings.items()}, group)
    if message := differences(gathered, dist.get_process_group_ranks(process_group_of(group))):
        raise RanksDisagree(f"ranks disagree on {subject}: {message}")


def differences(settings: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> str:
    """Which of ``ranks`` differ from the majority and in what, given the settings of each; empty if none does.

    Without a majority, as of two ranks, nobody can say who is right, and all are named.
    """
    parts: list[str] = []
    for name in sorted({name for each in settings for name in each}):
        values = [each.get(name, "nothing") for each in settings]
        usual, count = Counter(values).most_common(1)[0]
        if 2 * count <= len(values):
            parts += [f"rank {rank} has {name}={value}" for rank, value in zip(ranks, values, strict=True)]
        else:
            parts += [
                f"rank {rank} has {name}={value}, the others {usual}"
                for rank, value in zip(ranks, values, strict=True)
                if value != usual
            ]
    return "; ".join(parts)


def process_group_of(group: DeviceMesh | dist.ProcessGroup) -> dist.ProcessGroup:
    """The process group of all ranks of a mesh, or the group itself."""
    if isinstance(group, DeviceMesh):
        return group.get_group() if group.ndim == 1 else group._flatten().get_group()
    return group


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


def _message(value: Any, group: dist.ProcessGroup) -> Tensor:
    """The bytes of an object, on the device on which the ranks of ``group`` exchange such: the CPU, where possible."""
    device = dist.distributed_c10d._get_object_coll_device(group)
    return torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8).to(device)


def _decode(message: Tensor) -> Any:
    return decode(message.cpu().numpy().tobytes())


def _plain(value: Any) -> Any:
    """What msgpack has: others become dictionaries with a tag."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes):
        return value
    if kind is list:
        return [_plain(entry) for entry in value]
    if kind is dict and _TAG not in value and all(type(key) is str for key in value):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, dict):
        return {_TAG: "dict", "items": [[_plain(key), _plain(entry)] for key, entry in value.items()]}
    if isinstance(value, Enum):
        return {_TAG: "enum", "class": _name(kind), "name": value.name}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {
            _TAG: "class",
            "class": _name(kind),
            "fields": {name: _plain(getattr(value, name)) for name in value._fields},
        }
    if is_dataclass(value):
        own = {field.name: _plain(getattr(value, field.name)) for field in fields(value) if field.init}
        return {_TAG: "class", "class": _name(kind), "fields": own}
    if isinstance(value, (tuple, set, frozenset)):
        name = next(base.__name__ for base in (tuple, set, frozenset) if isinstance(value, base))
        return {_TAG: name, "items": [_plain(entry) for entry in value]}
    if isinstance(value, Path):
        return {_TAG: "path", "path": str(value)}
    if isinstance(value, Tensor):
        values = value.detach().cpu().contiguous()
        data = values.reshape(-1).view(torch.uint8).numpy().tobytes()
        return {_TAG: "tensor", "dtype": str(values.dtype), "shape": list(values.shape), "data": data}
    for base in (int, float, str):  # such as a NumPy number
        if isinstance(value, base):
            return base(value)
    raise TypeError(f"ranks exchange plain data, not {kind.__module__}.{kind.__qualname__}")


def _tagged_fields(value: Any, names: Sequence[str]) -> dict[str, Any]:
    return {
        _TAG: "class",
        "class": _name(type(value)),
        "fields": {name: _plain(getattr(value, name)) for name in names},
    }


def _rebuilt(value: Any) -> Any:
    """What `_plain` was given."""
    if isinstance(value, list):
        return [_rebuilt(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _rebuilt(entry) for key, entry in value.items()}
    match value[_TAG]:
        case "dict":
            return {_rebuilt(key): _rebuilt(entry) for key, entry in value["items"]}
        case "tuple" | "set" | "frozenset" as name:
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[name](map(_rebuilt, value["items"]))
        case "path":
            return Path(value["path"])
        case "tensor":
            dtype = getattr(torch, value["dtype"].removeprefix("torch."))
            flat = torch.frombuffer(bytearray(value["data"]), dtype=torch.uint8) if value["data"] else torch.empty(0)
            return flat.view(dtype).reshape(value["shape"]) if value["data"] else flat.to(dtype).reshape(value["shape"])
        case "enum":
            return _class(value["class"])[value["name"]]
        case _:
            return _class(value["class"])(**{name: _rebuilt(entry) for name, entry in value["fields"].items()})


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
