"""Python objects between ranks: gathering, broadcasting, errors that all ranks raise together, and agreement.

Objects are plain data: numbers, strings, bytes, containers of such, paths and tensors, and dataclasses where the
receiver names their type. They are encoded with msgpack, and nothing that arrives is unpickled or imported. Tuples and
sets arrive as lists.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from phantom_parallel.distributed.signals import Interrupted, LossDiverged

T = TypeVar("T")
Group = DeviceMesh | dist.ProcessGroup | None
_PATH, _TENSOR = 1, 2  # extensions of msgpack


class RanksDisagree(ValueError):
    """Ranks that share a layer were given different arguments for it."""


# Types that an error keeps on its way to other ranks and to the launcher, subclasses first.
_KINDS = (FileExistsError, OSError, RanksDisagree, ValueError, Interrupted, LossDiverged)
_ERRORS = {kind.__name__: kind for kind in _KINDS}


def all_gather_objects(value: T, group: Group, kind: Any = Any) -> list[T]:
    """Gather an object of the type ``kind`` from each rank of ``group``, in the order of ranks; None is this process
    alone. Ranks of a ``fake`` process group all hold the same object.
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
    return [decode(m[: int(n)].cpu().numpy().tobytes(), kind) for m, n in zip(messages, lengths, strict=True)]


def barrier(group: Group) -> None:
    """Wait for all ranks of ``group``; None is this process alone. Ranks of a ``fake`` process group do not wait."""
    if group is None:
        return
    group = process_group_of(group)
    if dist.get_world_size(group) > 1 and dist.get_backend(group) != "fake":
        dist.barrier(group)


def broadcast_from_rank_zero(work: Callable[[], T], group: dist.ProcessGroup | None = None, kind: Any = Any) -> T:
    """Call ``work`` on the first rank of ``group``, by default of all ranks, and return its result, of the type
    ``kind``, or raise its ValueError or OSError, on every rank.
    """
    if not dist.is_initialized():
        return work()
    group = dist.distributed_c10d._get_default_group() if group is None else group
    result = on_every_rank(lambda: work() if dist.get_rank(group) == 0 else None, group)
    return cast(T, all_gather_objects(result, group, kind | None)[0])


def on_every_rank(work: Callable[[], T], group: Group) -> T:
    """Run ``work`` on every rank of ``group`` and raise the error of the first rank that has one on all of them."""
    result, error = None, None
    try:
        result = work()
    except (ValueError, OSError) as raised:
        error = raised
    raise_on_all_ranks(error, group)
    return cast(T, result)


def raise_on_all_ranks(error: Exception | None, group: Group) -> None:
    """Raise the error of the first rank of ``group`` that has one on every rank. Each calls this, with its own error or
    None, so that no rank waits for another one that gave up. On other ranks it is a ValueError, an OSError, or else a
    RuntimeError.
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
    """Raise RanksDisagree on every rank of ``group`` if ``settings`` differ by their representation, which names the
    ranks that differ from the majority; without one, all.
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
    """Let torch's own object collectives raise: any process that reaches gloo or NCCL could send a pickle."""
    c10d: Any = dist.distributed_c10d
    for name in ("_pickler", "_unpickler"):  # torch's own places for other picklers
        assert hasattr(c10d, name)
        setattr(c10d, name, _refuse)


def _refuse(file: object) -> Any:
    raise RuntimeError("objects between ranks are not pickled: use phantom_parallel.distributed.objects")


def encode(value: Any) -> bytes:
    """A plain object as bytes; TypeError if it is none."""
    return msgspec.msgpack.encode(value, enc_hook=_extended)


def decode(message: bytes, kind: Any = Any) -> Any:
    """The object that `encode` was given, of the type ``kind``; RuntimeError if the message is of something else."""
    try:
        return msgspec.msgpack.decode(message, type=kind, ext_hook=_restored)
    except (msgspec.MsgspecError, TypeError) as error:
        raise RuntimeError(f"a message was received that no rank of this launch has sent: {error}") from None


def _extended(value: Any) -> Any:
    """What msgpack does not have, as an extension of it."""
    if isinstance(value, Path):
        return msgspec.msgpack.Ext(_PATH, str(value).encode())
    if isinstance(value, Tensor):
        values = value.detach().cpu().contiguous()
        data = values.reshape(-1).view(torch.uint8).numpy().tobytes()
        return msgspec.msgpack.Ext(_TENSOR, encode((str(values.dtype), values.shape, data)))
    for base in (float, str, tuple):  # such as a NumPy number
        if isinstance(value, base):
            return base(value)  # type: ignore[arg-type]
    raise TypeError(f"ranks exchange plain data, not {type(value).__module__}.{type(value).__qualname__}")


def _restored(code: int, data: memoryview) -> Any:
    """What `_extended` was given."""
    if code == _PATH:
        return Path(bytes(data).decode())
    name, shape, values = decode(bytes(data), tuple[str, tuple[int, ...], bytes])
    dtype = getattr(torch, name.removeprefix("torch."))
    flat = torch.frombuffer(bytearray(values), dtype=dtype) if values else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)
