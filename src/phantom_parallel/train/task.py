"""The interface between the training loop and a family: a model, its data and its loss."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from phantom_parallel.distributed.data_parallel import average_gradients, compile_layers, reduce_gradients
from phantom_parallel.distributed.pipeline import Pipeline
from phantom_parallel.distributed.process_group import ParallelContext
from phantom_parallel.train.config import TrainConfig

C = TypeVar("C", bound=TrainConfig)


class Task(ABC, Generic[C]):
    """A model on the ranks of ``parallel``, its data, counted in rows, and its loss.

    Static methods are called before any rank starts. A loss is *this rank's share* of the loss, on which the loop calls
    backward; the shares of the ranks that share a model and have ``counts`` set sum up to its loss.
    """

    classifies: ClassVar[bool] = False  # whether `measure` counts the rows that were classified correctly

    config: C
    parallel: ParallelContext
    model: nn.Module
    counts: bool  # whether this rank's share is part of the sum
    held_out: Tensor  # the rows that are evaluated
    digest: str | None = None  # `data_digest` of the data that were opened
    teacher_loss: float | None = None  # held-out loss of the model that is learned from, where there is one
    initial_loss: float | None = None  # held-out loss before the first step, where the model is not an initial one
    pipeline: Pipeline | None = None  # what runs the stages of a model, one on each rank
    _forward: Callable[..., Tensor]  # the model, or what it was compiled to
    _copying: torch.Stream | None = None  # the stream of copies to an accelerator
    _prefetched: tuple[Tensor, tuple[Tensor, Tensor], torch.Event] | None = None  # rows, their batch, and its arrival

    @abstractmethod
    def __init__(self, config: C, parallel: ParallelContext) -> None: ...

    @staticmethod
    @abstractmethod
    def check(config: C) -> None:
        """Raise ValueError or OSError if the data cannot be used."""

    @staticmethod
    @abstractmethod
    def outline(config: C) -> nn.Module:
        """Return the whole model on the meta device, without data."""

    @staticmethod
    def data_bytes(config: C) -> int:
        """Return the bytes of data that the ranks of one copy hold together, at least."""
        return 0

    @staticmethod
    def data_digest(config: C) -> str | None:
        """Return a digest of the data, if they can change while the config stays the same."""
        return None

    @staticmethod
    def prepare(config: C, out: Path) -> None:
        """Write the files to the training's folder that its model will need beside its weights."""

    @staticmethod
    def complete(out: Path, model: Path) -> None:
        """Copy these files to the model's folder, before it is renamed to its final name."""

    @abstractmethod
    def rows_of(self, step: int) -> Tensor:
        """Return the (batch,) rows of a step, counted from 0, of all copies: a function of the seed and the step."""

    def new_objective(self, step: int) -> bool:
        """Return whether the loss of this step is another than that of the step before: the optimizer starts anew."""
        return False

    @abstractmethod
    def loss(self, rows: Tensor) -> Tensor:
        """Return this rank's share of the mean loss of these rows."""

    @abstractmethod
    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of these rows on the host."""

    def prefetch(self, rows: Tensor) -> None:
        """Start to copy what `load` will return for these rows to an accelerator, while its queue is worked off."""
        self._copying = self._copying or torch.Stream(self.parallel.device)
        with self._copying:
            self._prefetched = rows, self.to_device(*self.take(rows)), self._copying.record_event()

    def load(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of these rows on this rank's device, which may be there already."""
        if self._prefetched is None or not torch.equal(rows, self._prefetched[0]):
            return self.to_device(*self.take(rows))
        (_, batch, arrived), self._prefetched = self._prefetched, None
        current = torch.accelerator.current_stream(self.parallel.device)
        current.wait_event(arrived)
        for values in batch:
            values.record_stream(current)  # the memory is the other stream's
        return batch

    def forward_backward(self, rows: Tensor, weight: float, *, last: bool) -> Tensor:
        """Accumulate the gradients of ``weight``, the share of these rows of a step, times their mean loss, and return
        this rank's share of that. Fully sharded gradients are reduced over ranks with the ``last`` rows of the step.
        """
        if self.pipeline is not None:
            return self.pipeline.forward_backward(*self.load(rows), weight)
        reduce_gradients(self.model, last)
        loss = self.loss(rows) * weight
        loss.backward()
        return loss.detach()

    @abstractmethod
    def measure(self, rows: Tensor) -> Tensor:
        """Return (2,): this rank's share of the summed losses of these held-out rows, and how many of them were
        classified correctly if the task ``classifies``.
        """

    def check_rows(self, rows: Tensor) -> None:
        """Raise ValueError if this rank's data of these rows are not finite: called after a loss that is not."""

    def compile(self) -> None:
        """Compile ``_forward``, by which `loss` runs the model, or the layers of a fully sharded model."""
        if isinstance(self.model, FSDPModule):
            compile_layers(cast(nn.ModuleList, self.model.layers))
        else:
            self._forward = cast(Callable[..., Tensor], torch.compile(self.model))

    @property
    def sharded_over_copies(self) -> bool:
        """Whether the weights are sharded over the data-parallel copies, as by FSDP2, which averages the gradients."""
        return False

    def average(self) -> None:
        """Average the gradients over the data-parallel copies."""
        if not self.sharded_over_copies:
            average_gradients(self.model, self.parallel.dp)

    def to_device(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Move a batch to this rank's device: from pinned memory, so that the host does not wait for the copy."""
        device = self.parallel.device
        if device.type == "cpu":
            return inputs, targets
        return inputs.pin_memory().to(device, non_blocking=True), targets.pin_memory().to(device, non_blocking=True)

    def autocast(self) -> torch.autocast:
        """Return the context of the training's precision."""
        return torch.autocast(self.parallel.device.type, torch.bfloat16, enabled=self.config.dtype == "bf16")
