"""Measures how a rank's time splits into compute, exposed communication and idle time.

    communication  blocked in the wait for a collective. Communication that compute hides takes no time here; the wait
                   for a rank that is late does.
    compute        inside a step and not blocked. A window without steps counts as one step.
    idle           the rest: between steps, and in the wait for other ranks at the end of a window.

The three add up to the window. On a CPU, the host times the waits. On an accelerator, events on the compute stream
before and after each wait measure how long the stream was stalled, which the host cannot see.

Only waits of the training's own threads count: the thread that created the recorder, and autograd's. A thread that
Python started for something else, such as writing a checkpoint, waits beside the step and does not block it.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from phantom_parallel.utils.timers import Timer

T = TypeVar("T")

_MAX_PENDING = 512  # intervals kept before finished ones are summed; bounds the number of live events
_wait_tensor = torch.ops._c10d_functional.wait_tensor.default
# Our kernel hides the backend's. The operator is registered for all backends with one kernel, which the undefined key
# reaches too. Redispatching releases the GIL during the wait, as the operator does without hooks; a direct call of the
# kernel would not.
_ANY_BACKEND = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)


def can_split_time(model: nn.Module, device: torch.device) -> bool:
    """Return whether the waits of ``model`` are observed, which separates them from computing.

    On an accelerator FSDP2 makes one stream wait for an event of another, which no hook sees: its stalls would count as
    computing.
    """
    return device.type == "cpu" or not any(isinstance(module, FSDPModule) for module in model.modules())


class TimeTotals(NamedTuple):
    """Seconds since the recorder was created. The difference of two totals covers a window."""

    step_seconds: float = 0.0
    blocked_seconds: float = 0.0  # inside steps, in waits for collectives
    blocked_outside: float = 0.0  # in waits outside of steps

    def since(self, earlier: "TimeTotals") -> "TimeTotals":
        """Return the seconds between ``earlier`` and this total."""
        return TimeTotals(*(after - before for after, before in zip(self, earlier, strict=True)))

    def busy(self, body_seconds: float) -> tuple[float, float]:
        """Return the compute and communication seconds of a window whose body took ``body_seconds``."""
        communication = self.blocked_seconds + self.blocked_outside
        if self.step_seconds > 0:
            return max(self.step_seconds - self.blocked_seconds, 0.0), communication
        return max(body_seconds - communication, 0.0), communication


class TimeSplitRecorder:
    """Records steps, and the waits for tensors on one type of device, while it is entered."""

    def __init__(self, device_type: str, timer: Timer) -> None:
        self._device_type, self._timer = device_type, timer
        self._totals = TimeTotals()
        self._pending: deque[tuple[str, Any, Any]] = deque()  # a field of the totals, and the marks of an interval
        self._step_start: Any = None  # the mark at which the open step began
        self._thread = threading.get_ident()
        self._observing = ExitStack()

    def __enter__(self) -> Self:
        self._observing.enter_context(observe_waits(self._device_type, self))
        return self

    def __exit__(self, *exception: object) -> None:
        self._observing.close()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context manager around one step. Steps do not nest."""
        if self._step_start is not None:
            raise ValueError("a step is already open: steps do not nest")
        self._step_start = self._timer.mark()
        try:
            yield
        finally:
            self._record("step_seconds", self._step_start)
            self._step_start = None

    def begin_wait(self) -> Any:
        # Autograd's threads are started by C++: Python represents them by dummies.
        thread = threading.current_thread()
        blocks = thread.ident == self._thread or isinstance(thread, threading._DummyThread)
        return self._timer.mark() if blocks else None

    def end_wait(self, mark: Any) -> None:
        if mark is not None:
            self._record("blocked_outside" if self._step_start is None else "blocked_seconds", mark)

    def totals(self) -> TimeTotals:
        """Return the totals so far, of steps that have ended. Waits for the device."""
        self._sum_pending(wait=True)
        return self._totals

    def _record(self, field: str, start: Any) -> None:
        """Record the interval from ``start`` to now."""
        self._pending.append((field, start, self._timer.mark()))
        if len(self._pending) > _MAX_PENDING:
            self._sum_pending(wait=False)

    def _sum_pending(self, wait: bool) -> None:
        while self._pending and (wait or self._timer.ready(self._pending[0][2])):
            field, start, end = self._pending.popleft()
            total = getattr(self._totals, field) + self._timer.seconds(start, end)
            self._totals = self._totals._replace(**{field: total})


@contextmanager
def observe_waits(device_type: str, observer: Any) -> Iterator[None]:
    """Context manager that calls ``observer.begin_wait`` and ``end_wait`` around every wait for a collective on
    ``device_type``, on the thread that waits (autograd's threads included).

    Functional collectives (the layers of this library, DTensor, compiled graphs) all wait through one operator,
    ``_c10d_functional::wait_tensor``: a Python kernel goes in front of the backend's own. ``torch.distributed`` waits
    through ``Work.wait``, which is wrapped. This costs a few microseconds per wait, and nothing without observers.
    """
    if device_type not in _libraries:
        library = _libraries[device_type] = torch.library.Library("_c10d_functional", "IMPL")
        key = torch._C._dispatch_key_for_device(device_type)
        library.impl("wait_tensor", _observed_wait_tensor, key, with_keyset=True)
    dist.Work.wait = _observed_work_wait  # type: ignore[assignment, method-assign]
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
        if not _observers:
            dist.Work.wait = _work_wait  # type: ignore[method-assign]
            while _libraries:
                _libraries.popitem()[1]._destroy()


# The hooks are those of the process, and so are these.
_observers: list[Any] = []
_libraries: dict[str, torch.library.Library] = {}  # by type of device
_work_wait = dist.Work.wait


def _observed_wait_tensor(keyset: Any, tensor: Tensor) -> Tensor:
    return _observed(lambda: _wait_tensor.redispatch(_ANY_BACKEND, tensor))


def _observed_work_wait(work: dist.Work, *args: Any, **kwargs: Any) -> bool:
    return _observed(lambda: _work_wait(work, *args, **kwargs))


def _observed(wait: Callable[[], T]) -> T:
    marks = [(observer, observer.begin_wait()) for observer in _observers]
    try:
        return wait()
    finally:
        for observer, mark in marks:
            observer.end_wait(mark)
