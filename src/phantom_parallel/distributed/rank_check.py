"""Debug mode that compares what ranks are about to exchange, before every collective of this library's operators.

Ranks that differ in batch, dtype, autocast, frozen parameters or the order of layers would abort, hang or compute wrong
numbers. Here they raise the same error on every rank instead, which names the rank, the layer and the difference. The
signatures go through the store of the process group, not through collectives: they are neither mixed up with other
collectives nor counted by a `Ledger`, and a rank that does not answer can be named. Compiled code is not checked.

``PHANTOM_DEBUG=ranks`` compares every collective of a process; `check_ranks` those of a block.
"""

import hashlib
import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from phantom_parallel.distributed.errors import PeerFailed
from phantom_parallel.distributed.objects import Group, RanksDisagree, differences, majority, process_group_of
from phantom_parallel.ops import collectives

VARIABLE = "PHANTOM_DEBUG"
_OPS = str(Path(collectives.__file__).parent)
_LONGEST_PAUSE = 0.02  # seconds between looks at the store
_VIEWS = 3  # how many steps of a graph are between a layer's output and its operator at most
# Checked blocks of each group, so that keys of one block are not taken for those of another.
_entered: Counter[str] = Counter()
_for_the_process = ExitStack()  # what the environment has switched on
Signature = dict[str, str]
_active: "RankCheck | None" = None  # that is installed


@contextmanager
def check_ranks(group: Group = None, timing: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Iterator[None]:
    """Compare the collectives of this library's operators over their ranks, within this block.

    Every rank of ``group`` enters and leaves the block. Within a block that is checked already, this does nothing.

    Args:
        group: The ranks; by default those of the default process group.
        timing: Makes a context that is entered around each comparison, to account for its time.

    Raises:
        RanksDisagree: On every rank, before the collective in which ranks differ, or at the end of the block.
        PeerFailed: If another rank raised any other error within the block.

    Example::

        with check_ranks():
            loss(model(x)).backward()
    """
    if collectives.before_collective is not None or not dist.is_initialized():
        yield
        return
    found = process_group_of(dist.distributed_c10d._get_default_group() if group is None else group)
    _entered[found.group_name] += 1
    check = RankCheck(f"{found.group_name}/{_entered[found.group_name]}", found, timing)
    with check.installed():
        try:
            yield
        except BaseException as error:
            check.leave(error)
            raise
        check.leave()


@contextmanager
def running(module: nn.Module) -> Iterator[None]:
    """Name a module in the comparisons of this block, where it is run by other methods than its forward pass."""
    if _active is None:
        yield
        return
    _active.modules.append(_active.identity(module))
    try:
        yield
    finally:
        _active.modules.pop()


def check_replicated(name: str, values: Tensor, group_name: str) -> None:
    """Compare a tensor that all ranks of a group must have alike, such as tokens, if ranks are checked now."""
    if collectives.before_collective is not None:
        data = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        about = {"values": hashlib.sha256(data).hexdigest()[:16]}
        collectives.before_collective(values, group_name, f"the {name} of the model, which all ranks need alike", about)


def check_gradient(name: str, gradient: Tensor, group_name: str) -> None:
    """Compare an all-reduce of a parameter's gradient over its ranks, if ranks are checked now."""
    if collectives.before_collective is not None:
        collectives.before_collective(gradient, group_name, f"all_reduce of the gradient of {name}")


class RankCheck:
    """Compares this rank's collectives with those of the others. The first rank of a group collects and judges.

    Args:
        name: Common to the ranks, and unique among checks.
        group: The ranks that leave the block together; None if the check does not end.
        timing: As for `check_ranks`.
    """

    def __init__(
        self,
        name: str,
        group: dist.ProcessGroup | None = None,
        timing: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._name, self._group, self._timing = f"phantom-debug/{name}", group, timing
        self._made: Counter[str] = Counter()  # collectives of each group
        self.modules: list[tuple[str, int | None]] = []  # that run now, the innermost last
        self._module_names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._store: Any = None
        self._deadline = 0.0  # of the comparison under way

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Check every collective in this context."""
        handles = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._exit_module, always_call=True),
        ]
        global _active
        collectives.before_collective, _active = self.compare, self
        try:
            yield
        finally:
            collectives.before_collective = _active = None
            for handle in handles:
                handle.remove()

    def compare(self, sent: Tensor, group_name: str, call: str = "", about: Signature | None = None) -> None:
        """Compare a collective that this rank is about to make over the ranks of the group.

        Args:
            sent: What is sent.
            group_name: Name of the process group.
            call: What is called; by default it is found among the functions that run.
            about: More that ranks must have in common.
        """
        group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[attr-defined, arg-type]
        if dist.get_backend(group) == "fake":
            return
        self._made[group_name] += 1
        number, key = self._made[group_name], f"{self._name}/{group_name}"
        with self._timing():
            signature = self._signature(sent, call) | (about or {})
            self._agree(f"{key}/{number}", group, signature, f"collective {number}")
            for name in ("verdict", dist.get_rank()):  # of the collective before: all ranks have read it
                self._store.delete_key(f"{key}/{number - 1}/{name}")

    def leave(self, error: BaseException | None = None) -> None:
        """Wait for the other ranks at the end of the block, or with an error let them know why this one is gone."""
        assert self._group is not None
        key, rank = f"{self._name}/end", dist.get_rank()
        if error is None:
            with self._timing():
                self._agree(key, self._group, {"call": "left the checked block"}, "the end of the checked block")
            return
        left = {"call": f"raised {type(error).__name__}: {error}"}
        if isinstance(error, RanksDisagree | PeerFailed):  # known to others already: it is passed on as it is
            left["verdict"] = str(error)
        if not isinstance(error, RanksDisagree):
            left["failed"] = "yes"
        self._write(f"{key}/{rank}", left)
        if rank == dist.get_process_group_ranks(self._group)[0]:
            self._write(f"{key}/verdict", _passed_on(left, f"rank {rank} {left['call']}"))

    def _agree(self, key: str, group: dist.ProcessGroup, signature: Signature, subject: str) -> None:
        """Raise on every rank unless all ranks of the group have the same signature."""
        if dist.get_backend(group) == "fake":
            return
        ranks, timeout = dist.get_process_group_ranks(group), timeout_of(group).total_seconds()
        first = ranks[0] == dist.get_rank()
        self._write(f"{key}/{dist.get_rank()}", signature)
        if first:
            verdict = self._verdict(self._collect(key, ranks, timeout), subject)
            self._write(f"{key}/verdict", verdict)
        elif self._await([f"{key}/verdict"], key, ranks[:1], timeout):
            verdict = self._read(f"{key}/verdict")
        else:
            verdict = self._verdict(self._known(key, ranks, timeout), subject)
        if "message" in verdict:
            raise (PeerFailed if "failed" in verdict else RanksDisagree)(verdict["message"])

    def _collect(self, key: str, ranks: Sequence[int], timeout: float) -> dict[int, Signature]:
        if self._await([f"{key}/{rank}" for rank in ranks], key, ranks, timeout):
            return {rank: self._read(f"{key}/{rank}") for rank in ranks}
        return self._known(key, ranks, timeout)

    def _await(self, keys: list[str], key: str, ranks: Sequence[int], timeout: float) -> bool:
        """Wait until ``keys`` are there; False if the time is up, or if one of ``ranks`` has left and will not come."""
        pause, self._deadline = _LONGEST_PAUSE / 128, time.monotonic() + timeout
        while not self._store.check(keys):
            if pause == _LONGEST_PAUSE and (time.monotonic() > self._deadline or self._is_gone(key, ranks)):
                return bool(self._store.check(keys))  # it may have come just before it left
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return True

    def _is_gone(self, key: str, ranks: Sequence[int]) -> bool:
        """Whether one of the ranks has left the block without this comparison."""
        end = f"{self._name}/end"
        return key != end and any(
            self._store.check([f"{end}/{rank}"]) and not self._store.check([f"{key}/{rank}"]) for rank in ranks
        )

    def _known(self, key: str, ranks: Sequence[int], timeout: float) -> dict[int, Signature]:
        """What is known of the ranks when some of them did not come."""
        known: dict[int, Signature] = {}
        for rank in ranks:
            there = [place for place in (f"{key}/{rank}", f"{self._name}/end/{rank}") if self._store.check([place])]
            if there:
                known[rank] = self._read(there[0])
            elif time.monotonic() > self._deadline:
                known[rank] = {"call": f"made no collective within {timeout:g} s"}
        return known

    def _verdict(self, found: dict[int, Signature], subject: str) -> Signature:
        """Empty if all ranks agree; otherwise a message, and whether a rank failed for another reason."""
        for one in found.values():
            if "verdict" in one:
                return _passed_on(one, "")
        calls = [one["call"] for one in found.values()]
        if len(set(calls)) == 1:
            different = differences(list(found.values()), list(found))
            what = calls[0].removeprefix("called ")
            return {"message": f"ranks disagree in {what} ({subject}): {different}"} if different else {}
        usual = majority(calls)
        odd = [f"rank {rank} {one['call']}" for rank, one in found.items() if usual is None or one["call"] != usual[0]]
        odd += [] if usual is None else [f"the others {usual[0]}"]
        message = f"ranks disagree at {subject}: {'; '.join(odd)}"
        failed = any(call.startswith("raised") for call in calls)
        return {"message": message} | ({"failed": "yes"} if failed else {})

    def _signature(self, sent: Tensor, call: str) -> Signature:
        kind = sent.device.type
        autocast = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "off"
        signature = {"shape": str(tuple(sent.shape)), "dtype": str(sent.dtype), "autocast": autocast}
        return {"call": f"called {call}"} | signature if call else signature | self._caller(sent, sys._getframe(2))

    def _caller(self, sent: Tensor, frame: FrameType | None) -> Signature:
        """What made a collective, from the functions that run: the operator, its layer, the tensor that it handed in
        (which may be sent in another dtype, or repeated for every rank), and its inputs that need gradients.
        """
        collective, given, number = "", sent, None
        while frame is not None and frame.f_code.co_filename == collectives.__file__:
            collective = frame.f_code.co_name.removeprefix("start_")
            first = frame.f_locals[frame.f_code.co_varnames[0]]
            given = first if isinstance(first, Tensor) else given
            frame = frame.f_back
        operator = "" if frame is None else frame.f_code.co_qualname
        layer, number = self.modules[-1] if self.modules else ("", None)
        needs = str(torch.is_grad_enabled())
        while frame is not None and frame.f_code.co_filename.startswith(_OPS):
            code = frame.f_code
            if code.co_varnames[:1] == ("ctx",):  # forward or backward of an autograd.Function
                context, operator = frame.f_locals["ctx"], code.co_qualname.lstrip("_")
                if code.co_name == "forward":
                    context.layer, context.names = (layer, number), _input_names(code)
                layer, number = getattr(context, "layer", ("", None))  # unknown if the forward pass was not checked
                if not hasattr(context, "names"):  # the forward pass has no collective, or was not checked
                    context.names = _input_names(type(context)._forward_cls.forward.__code__)
                inputs = zip(context.names, context.needs_input_grad, strict=False)
                needs = ", ".join(name for name, need in inputs if need) or "none"
                break
            frame = frame.f_back
        where = f" in {layer}" if layer else ""
        call, dtype = f"called {collective} of {operator}{where}", str(given.dtype)
        dtype += "" if sent.dtype == given.dtype else f" sent as {sent.dtype}"
        found = {"call": call, "shape": str(tuple(given.shape)), "dtype": dtype, "gradients of": needs}
        return found if number is None else found | {"layer built as number": str(number)}

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self.modules.append(self.identity(module))

    def identity(self, module: nn.Module) -> tuple[str, int | None]:
        """The name of a module, which others of its class may share, and the number by which ranks tell layers apart
        (`nn.sharded.next_layer_number`).
        """
        if module not in self._module_names:
            root = type(module).__name__
            for name, child in module.named_modules():
                self._module_names.setdefault(child, f"{root}.{name}" if name else root)
        return self._module_names[module], getattr(module, "layer_number", None)

    def _exit_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self.modules:
            return
        layer = self.modules.pop()
        node: Any = output.grad_fn if isinstance(output, Tensor) else None
        for _ in range(_VIEWS):  # an operator whose forward pass has no collective has not been named by one
            if node is not None and hasattr(type(node), "_forward_cls"):
                node.layer = getattr(node, "layer", layer)
                return
            node = node.next_functions[0][0] if node is not None and node.next_functions else None

    def _write(self, key: str, value: Signature) -> None:
        if self._store is None:  # a connection of its own: a store may serve one request at a time
            self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self._store.set(key, json.dumps(value))

    def _read(self, key: str) -> Signature:
        found: Signature = json.loads(self._store.get(key))
        return found


def _passed_on(left: Signature, message: str) -> Signature:
    """The verdict for all ranks on one that has left with an error."""
    verdict = {"message": left.get("verdict", message)}
    return verdict | {"failed": "yes"} if "failed" in left else verdict


def _input_names(code: CodeType) -> Sequence[str]:
    """Names of the inputs of an `autograd.Function`, from the code of its forward pass."""
    return code.co_varnames[1 : code.co_argcount]


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long a collective of the group may take."""
    options = group._get_backend(group._device_types[0]).options
    timeout: timedelta = options._timeout
    return timeout


def enable_from_environment() -> None:
    """Check the collectives of this process from now on, if the environment asks for it."""
    value = os.environ.get(VARIABLE)
    if value == "ranks":
        _for_the_process.enter_context(RankCheck("process").installed())
    elif value:
        warnings.warn(f"{VARIABLE}={value} has no meaning: the only value is ranks", UserWarning, stacklevel=2)


enable_from_environment()
