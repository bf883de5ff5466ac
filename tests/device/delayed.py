"""A process group for CPU tensors that treats memory as NCCL may: a collective runs as late as its semantics allow.

    start   check what NCCL checks, remember the inputs, fill the outputs with 0xFF (NaN), send nothing
    wait    run all collectives that were started up to this one, in their order, on gloo, with the inputs as they are

It raises if an input or an output was written between start and wait, a tensor is not contiguous, or NCCL does not have
its dtype. What is read before its wait is NaN. To ``ops.collectives`` this is not a gloo group: it takes the path of
accelerators, with native all-gathers and reduce-scatters.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, ProcessGroupGloo

NAME = "delayed"
NCCL_DTYPES = {
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
}
COLLECTIVES = (  # of a group
    *("allreduce", "allreduce_coalesced", "broadcast", "scatter", "allgather", "barrier"),
    *("all_gather_single", "_allgather_base", "all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    *("reduce_scatter_single", "_reduce_scatter_base", "reduce_scatter_single_coalesced"),
    *("reduce_scatter_tensor_coalesced", "all_to_all_single", "alltoall_base", "send", "recv"),
)


def register() -> None:
    """Let ``init_process_group("delayed")`` make such a group."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, DelayedGroup, devices=["cpu"])


def _bytes(t: Tensor) -> Tensor:
    return t.detach().reshape(-1).view(torch.uint8)  # a view, as t is contiguous


class DelayedWork(dist._Work):
    """A collective that has started. Tensors in ``outputs`` that are also inputs are reduced or broadcast in place."""

    def __init__(self, group: "DelayedGroup", inputs: Sequence[Tensor], outputs: Sequence[Tensor], run: Any) -> None:
        super().__init__()
        self.group, self.inputs, self.outputs, self.run, self.done = group, inputs, outputs, run, False
        self.sent = [_bytes(t).clone() for t in inputs]
        for output in outputs:
            _bytes(output).fill_(0xFF)
        for t, value in zip(inputs, self.sent, strict=True):
            if not any(t is output for output in outputs) and not torch.equal(_bytes(t), value):
                _bytes(t).copy_(value)  # a gather in place: the input is a part of the output
        self.poisoned = [_bytes(t).clone() for t in outputs]

    def complete(self) -> None:
        self.done = True
        for t, value in zip(self.outputs, self.poisoned, strict=True):
            if not torch.equal(_bytes(t), value):
                raise RuntimeError(
                    f"an output of shape {tuple(t.shape)} was written before its collective was waited for"
                )
        for t, value in zip(self.inputs, self.sent, strict=True):
            if any(t is output for output in self.outputs):
                _bytes(t).copy_(value)
            elif not torch.equal(_bytes(t), value):
                raise RuntimeError(
                    f"an input of shape {tuple(t.shape)} was changed before its collective was waited for"
                )
        self.run()
        self.inputs = self.outputs = self.sent = self.poisoned = ()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.group.run_until(self)
        return True

    def is_completed(self) -> bool:
        return self.done

    def get_future(self) -> torch.futures.Future[Any]:
        outputs = list(self.outputs)
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(outputs)
        return future


class ReceivingWork(DelayedWork):
    """A tensor that is on its way from another rank, outside of the order of collectives."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.done:
            self.complete()
        return True


class SendingWork(dist._Work):
    """A copy of a tensor that is on its way to another rank."""

    def __init__(self, tensors: Sequence[Tensor], work: Any) -> None:
        super().__init__()
        self.tensors, self.work = tensors, work

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.work.wait()
        return True


class DelayedGroup(dist.ProcessGroup):
    """The group. Names of collectives are those of ``torch.distributed``'s C++ interface, new and old."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._gloo = rank, size, ProcessGroupGloo(store, rank, size, timeout)
        self._started: list[DelayedWork] = []

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return NAME

    getBackendName = name  # noqa: N815

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    pg_name = group_name

    def getGroupName(self) -> str:  # noqa: N802
        return self.group_name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo

    def run_until(self, work: DelayedWork) -> None:
        """Run what was started, in order, until ``work`` is done."""
        while not work.done:
            self._started.pop(0).complete()

    def _start(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], run: Callable[[], Any]) -> DelayedWork:
        for t in (*inputs, *outputs):
            if not t.is_contiguous():
                raise ValueError(f"Tensors must be contiguous, got shape {tuple(t.shape)} and strides {t.stride()}")
            if t.dtype not in NCCL_DTYPES:
                raise TypeError(f"Input tensor data type is not supported for NCCL process group: {t.dtype}")
        work = DelayedWork(self, inputs, outputs, run)
        self._started.append(work)
        return work

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> DelayedWork:
        return self._start(tensors, tensors, lambda: self._gloo.allreduce(tensors, opts or AllreduceOptions()).wait())

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> DelayedWork:
        return [self.allreduce([t]) for t in tensors][-1]

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> DelayedWork:
        return self._start(tensors, tensors, lambda: self._gloo.broadcast(tensors, opts).wait())

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> DelayedWork:
        parts = [part for group in inputs for part in group]
        return self._start(parts, outputs, lambda: self._gloo.scatter(outputs, inputs, opts).wait())

    def all_gather_single(self, output: Tensor, x: Tensor, opts: Any = None) -> DelayedWork:
        parts = list(output.view(self._size, -1).unbind(0))
        return self._start([x], [output], lambda: self._gloo.allgather([parts], [x.reshape(-1)]).wait())

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> DelayedWork:
        return self._start(tensors, outputs[0], lambda: self._gloo.allgather(outputs, tensors).wait())

    def reduce_scatter_single(self, output: Tensor, x: Tensor, opts: Any = None) -> DelayedWork:
        def run() -> None:
            total = x.clone()
            self._gloo.allreduce([total]).wait()
            output.copy_(total.view(self._size, -1)[self._rank].view(output.shape))
            if opts is not None and opts.reduceOp == dist.ReduceOp.AVG:
                output.div_(self._size)

        return self._start([x], [output], run)

    def all_to_all_single(self, output: Tensor, x: Tensor, to: Any, of: Any, opts: Any = None) -> DelayedWork:
        return self._start([x], [output], lambda: self._gloo.alltoall_base(output, x, to or [], of or []).wait())

    def all_gather_single_coalesced(self, outputs: list[Tensor], xs: list[Tensor], opts: Any = None) -> DelayedWork:
        return [self.all_gather_single(output, x) for output, x in zip(outputs, xs, strict=True)][-1]

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], xs: list[Tensor], opts: Any = None) -> DelayedWork:
        return [self.reduce_scatter_single(output, x, opts) for output, x in zip(outputs, xs, strict=True)][-1]

    def send(self, tensors: list[Tensor], to: int, tag: int) -> SendingWork:
        copies = [t.clone() for t in tensors]
        return SendingWork(copies, self._gloo.send(copies, to, tag))

    def recv(self, tensors: list[Tensor], of: int, tag: int) -> ReceivingWork:
        buffers = [torch.empty_like(t) for t in tensors]
        work = self._gloo.recv(buffers, of, tag)  # now: the other rank may wait for what it sends before it receives

        def run() -> None:
            work.wait()
            torch._foreach_copy_(tensors, buffers)

        return ReceivingWork(self, [], tensors, run)

    def barrier(self, opts: Any = None) -> DelayedWork:
        return self._start([], [], lambda: self._gloo.barrier().wait())

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
