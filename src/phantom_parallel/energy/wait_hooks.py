"""Hooks around every wait for a collective.

Functional collectives (the layers of this library, DTensor, ``AsyncCollectiveTensor``, compiled graphs) all wait
through one operator, ``_c10d_functional::wait_tensor``. While an observer is registered, a Python kernel in front of
the backend's own kernel calls it. This costs a few microseconds per wait, and nothing when no observer is registered.
``torch.distributed`` waits through ``Work.wait``, which is wrapped for as long.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

_wait_tensor = torch.ops._c10d_functional.wait_tensor.default
# Our kernel hides the backend's. The operator is registered for all backends with one kernel, which the undefined key
# reaches too. Redispatching releases the GIL during the wait, as the operator does without hooks; a direct call of the
# kernel would not.
_ANY_BACKEND = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)


class WaitObserver(Protocol):
    """Receives the begin and the end of each wait, on the thread that waits (autograd's threads included)."""

    def begin_wait(self) -> Any:
        """Called before the wait. The return value is passed to :meth:`end_wait`."""
        ...

    def end_wait(self, mark: Any) -> None:
        """Called after the wait, also when it raised."""
        ...


@contextmanager
def observe_waits(device_type: str, observer: WaitObserver) -> Iterator[None]:
    """Context manager that calls ``observer`` around every wait for a tensor on ``device_type``."""
    _hooks.add(device_type, observer)
    try:
        yield
    finally:
        _hooks.remove(device_type, observer)


class _Hooks:
    """The hooks of this process, installed while there are observers. The dispatcher is global, so this is too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._observers: dict[str, list[WaitObserver]] = {}
        self._libraries: dict[str, torch.library.Library] = {}
        self._original_work_wait: Any = None

    def add(self, device_type: str, observer: WaitObserver) -> None:
        with self._lock:
            observers = self._observers.setdefault(device_type, [])
            observers.append(observer)
            if len(observers) == 1:
                self._install_kernel(device_type, observers)
            if self._original_work_wait is None:
                self._wrap_work_wait()

    def remove(self, device_type: str, observer: WaitObserver) -> None:
        with self._lock:
            self._observers[device_type].remove(observer)
            if not self._observers[device_type]:
                self._libraries.pop(device_type)._destroy()
                del self._observers[device_type]
            if not self._observers:
                dist.Work.wait, self._original_work_wait = self._original_work_wait, None  # type: ignore[method-assign]

    def _install_kernel(self, device_type: str, observers: list[WaitObserver]) -> None:
        def wait(keyset: Any, tensor: Tensor) -> Tensor:
            return _observed(observers, lambda: _wait_tensor.redispatch(_ANY_BACKEND, tensor))

        library = torch.library.Library("_c10d_functional", "IMPL")
        library.impl("wait_tensor", wait, torch._C._dispatch_key_for_device(device_type), with_keyset=True)
        self._libraries[device_type] = library

    def _wrap_work_wait(self) -> None:
        original = self._original_work_wait = dist.Work.wait

        def wait(work: dist.Work, *args: Any, **kwargs: Any) -> bool:
            # A work does not say which device it is for, so observers of every device type are called.
            observers = [observer for registered in self._observers.values() for observer in registered]
            return _observed(observers, lambda: original(work, *args, **kwargs))

        dist.Work.wait = wait  # type: ignore[assignment, method-assign]


def _observed(observers: Iterable[WaitObserver], wait: Callable[[], T]) -> T:
    marks = [(observer, observer.begin_wait()) for observer in observers]
    try:
        return wait()
    finally:
        for observer, mark in marks:
            observer.end_wait(mark)


_hooks = _Hooks()
