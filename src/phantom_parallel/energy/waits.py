"""Where a rank blocks for an exchange, and how to be told of it.

Every wait of the functional collectives (this library's finishes, DTensor, ``AsyncCollectiveTensor``, compiled graphs)
is one operator, ``_c10d_functional::wait_tensor``. While somebody listens, a kernel of ours stands before the backend's
own in the dispatcher: a few microseconds a wait, and no trace of it when nobody does. The other way to wait,
``Work.wait`` of ``torch.distributed``, is wrapped for as long.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_wait_tensor = torch.ops._c10d_functional.wait_tensor.default
# The kernel of all backends, which ours hides: the operator has one for "no backend" too, and it is the same.
# Redispatching releases the interpreter's lock while it waits, as the unwrapped operator does; calling the kernel
# itself would not.
_NO_BACKEND = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)


class WaitListener(Protocol):
    """Told on whatever thread waits, autograd's included."""

    def begin_wait(self) -> Any:
        """Before; what it returns is given to `end_wait`."""
        ...

    def end_wait(self, mark: Any) -> None: ...


class _Hook:
    """Installed while it has listeners. One for the process, as the dispatcher is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[str, list[WaitListener]] = {}
        self._libraries: dict[str, torch.library.Library] = {}
        self._work_wait: Any = None

    def add(self, device_type: str, listener: WaitListener) -> None:
        with self._lock:
            listeners = self._listeners.setdefault(device_type, [])
            listeners.append(listener)
            if len(listeners) == 1:
                self._install(device_type, listeners)
            if self._work_wait is None:
                self._wrap_work()

    def remove(self, device_type: str, listener: WaitListener) -> None:
        with self._lock:
            self._listeners[device_type].remove(listener)
            if not self._listeners[device_type]:
                self._libraries.pop(device_type)._destroy()
                del self._listeners[device_type]
            if not self._listeners:
                dist.Work.wait, self._work_wait = self._work_wait, None  # type: ignore[method-assign]

    def _install(self, device_type: str, listeners: list[WaitListener]) -> None:
        def wait(keyset: Any, tensor: Tensor) -> Tensor:
            marks = [(listener, listener.begin_wait()) for listener in listeners]
            try:
                return _wait_tensor.redispatch(_NO_BACKEND, tensor)
            finally:
                for listener, mark in marks:
                    listener.end_wait(mark)

        library = torch.library.Library("_c10d_functional", "IMPL")
        library.impl("wait_tensor", wait, torch._C._dispatch_key_for_device(device_type), with_keyset=True)
        self._libraries[device_type] = library

    def _wrap_work(self) -> None:
        original = self._work_wait = dist.Work.wait

        def wait(work: dist.Work, *args: Any, **kwargs: Any) -> bool:
            told = [listener for listeners in self._listeners.values() for listener in listeners]
            marks = [(listener, listener.begin_wait()) for listener in told]
            try:
                return original(work, *args, **kwargs)
            finally:
                for listener, mark in marks:
                    listener.end_wait(mark)

        dist.Work.wait = wait  # type: ignore[assignment, method-assign]


_hook = _Hook()


@contextmanager
def listening(device_type: str, listener: WaitListener) -> Iterator[None]:
    """Tell ``listener`` of every wait for tensors on this type of device."""
    _hook.add(device_type, listener)
    try:
        yield
    finally:
        _hook.remove(device_type, listener)
