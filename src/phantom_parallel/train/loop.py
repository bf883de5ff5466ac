"""The loop: steps until the number of them or the target loss is reached, on ranks that exist already.

Ranks speak of anything but the model at *boundaries* only, the steps that log, evaluate or save: there they sum the
loss, agree on whether somebody asked to stop, and look for a loss that is no number. Between boundaries a step is what
a user's own loop would be, and its time is the time that is reported.
"""

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from phantom_parallel.distributed.context import ParallelContext
from phantom_parallel.distributed.errors import LossDiverged
from phantom_parallel.distributed.signals import StopRequest
from phantom_parallel.energy.time_split import TimeSplitRecorder, TimeTotals, timer_for
from phantom_parallel.families.registry import get_family
from phantom_parallel.train import checkpoint
from phantom_parallel.train.checkpoint import Progress
from phantom_parallel.train.config import TrainConfig
from phantom_parallel.train.optimizer import PartsOptimizer
from phantom_parallel.train.task import Task

__all__ = ["ParallelContext", "Record", "Summary", "train"]

Status = Literal["target", "steps", "interrupted"]


@dataclass(frozen=True)
class Record:
    """What is known at a boundary. Rates and shares are rank 0's, since the record before; ``compute_seconds`` and
    ``blocked_seconds`` are sums over all ranks since the training began or was resumed.
    """

    step: int
    loss: float
    eval_loss: float | None
    lr: float
    seconds: float
    samples_per_second: float
    blocked_share: float
    compute_seconds: float
    blocked_seconds: float
    accuracy: float | None = None  # of the held-out rows, where they have classes


@dataclass(frozen=True)
class Summary:
    """How a training ended. ``seconds`` are those of its steps alone: neither evaluation nor saving. So are
    ``compute_seconds`` and ``blocked_seconds``, sums over all ranks since the training began or was resumed.
    """

    status: Status
    step: int
    loss: float
    eval_loss: float | None  # the latest
    seconds: float
    samples_per_second: float
    blocked_share: float
    compute_seconds: float
    blocked_seconds: float
    parameters: int
    checkpoint: str | None
    accuracy: float | None = None  # the latest, where rows have classes

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def train(
    config: TrainConfig,
    parallel: ParallelContext,
    *,
    checkpoints: Path | None = None,
    resume: Path | None = None,
    report: Callable[[Record], None] | None = None,
) -> tuple[Any, Summary]:
    """Train on the ranks of ``parallel``; every one of them calls this. The model, and how it ended.

    Checkpoints go to the folder ``checkpoints`` where one is given, ``resume`` is one to go on from, and rank 0 calls
    ``report`` at every boundary.
    """
    with ExitStack() as stack:
        trainer = Trainer(config, parallel, checkpoints)
        if resume is not None:
            trainer.resume(resume)
        if config.compile:
            trainer.compile()
        stack.callback(trainer.clock.stop)
        trainer.clock.start()
        stack.callback(trainer.finish_writing)
        stop = stack.enter_context(StopRequest())
        summary = trainer.run(stop, report)
        return trainer.task.finished(), summary


class Trainer:
    """A task and its optimizer, at some step."""

    def __init__(self, config: TrainConfig, parallel: ParallelContext, checkpoints: Path | None) -> None:
        self.config, self.parallel, self.checkpoints = config, parallel, checkpoints
        torch.manual_seed(config.seed)
        self.task: Task[Any] = get_family(config.family).task()(config, parallel)
        cut = self.task.cut_over_copies
        self.optimizer = PartsOptimizer(self.task.model, config, parallel, cut_over_copies=cut)
        self.clock = TimeSplitRecorder(parallel.device.type, timer_for(parallel.device))
        self.progress = Progress(0, 0.0)
        self.last_checkpoint: Path | None = None
        self._eval_loss: float | None = None
        self._accuracy: float | None = None
        self._writer = ThreadPoolExecutor(1)  # starts its thread when needed, and ends it when left
        self._writing = False  # whether rank 0 is at it, which all ranks know
        self._written: Future[Path] | None = None

    def resume(self, path: Path) -> None:
        self.progress = checkpoint.load(path, self.optimizer, self.config)
        self.last_checkpoint = path

    def compile(self) -> None:
        """Compile both directions now, on rows of the usual shape, so that no step's time has it in it."""
        self.task.compile()
        self.task.loss(self.task.rows_of(0)[: self.config.micro_batch]).backward()
        self.task.model.zero_grad()

    def finish_writing(self) -> None:
        """Let a checkpoint under way come to its end, whatever ended the training."""
        self._writer.shutdown()

    def run(self, stop: StopRequest, report: Callable[[Record], None] | None) -> Summary:
        config, before, first = self.config, self.progress.seconds, self.progress.step
        start = last = self.clock.totals()
        record, last_step = None, first
        status: Status = "steps"
        for step in range(first + 1, config.steps + 1):
            with self.clock.step():
                loss = self._step(step - 1)
            every = (config.log_every, config.eval_every, config.checkpoint_every)
            if step < config.steps and all(step % interval for interval in every):
                continue
            now = self.clock.totals()
            ran = now.since(start)
            share = loss / config.dp if self.task.counts else 0.0 * loss
            blocked = ran.blocked_seconds
            total, asked, *spent = self._sum(share, stop.requested, ran.step_seconds - blocked, blocked)
            self.progress = Progress(step, before + ran.step_seconds, self.task.digest)
            self._check_finite(total, step)
            record = self._record(total, bool(asked), step - last_step, now.since(last), spent)
            last, last_step = now, step
            if report is not None and self.parallel.rank == 0:
                report(record)
            reached = record.eval_loss is not None and record.eval_loss <= (config.target_loss or -1.0)
            done = reached or asked or step == config.steps
            if done or step % config.checkpoint_every == 0:
                self._save()
            if done:
                status = "target" if reached else "interrupted" if asked and step < config.steps else "steps"
                break
        self._settle()
        assert record is not None  # the last step is a boundary, and a checkpoint of it is not resumed
        return self._summary(status, record, self.clock.totals().since(start), self.progress.step - first)

    def _step(self, step: int) -> Tensor:
        """One step; this rank's share of the loss before it, not yet summed."""
        config = self.config
        rows = self.task.rows_of(step).chunk(config.dp)[self.parallel.dp_rank]
        total = torch.zeros((), device=self.parallel.device)
        for piece in rows.chunk(config.gradient_accumulation_steps):
            loss = self.task.loss(piece) * (len(piece) / len(rows))
            loss.backward()
            total += loss.detach()
        self.task.average()
        self.optimizer.step(config.lr_factor(step))
        return total

    @torch.no_grad()
    def evaluate(self) -> None:
        """The mean loss of the held-out rows, and their accuracy; each copy takes a part of them, in as many pieces as
        the others do.
        """
        held, config = self.task.held_out, self.config
        pieces = math.ceil(math.ceil(len(held) / config.dp) / config.micro_batch)
        sums = torch.zeros(2, device=self.parallel.device)
        for piece in held.tensor_split(config.dp)[self.parallel.dp_rank].tensor_split(pieces):
            sums += self.task.measure(piece)
        loss, hits = self._sum(sums[0] if self.task.counts else 0.0 * sums[0], float(sums[1]))
        self._eval_loss = loss / len(held)
        self._accuracy = hits / len(held) if self.task.classifies else None

    def _sum(self, value: Tensor, *more: float) -> list[float]:
        """Numbers, each summed over all ranks."""
        numbers = torch.stack([value.double(), *value.new_tensor(more, dtype=torch.float64)])
        if not self.parallel.single_process:
            dist.all_reduce(numbers, group=self.parallel.group)
        return numbers.tolist()

    def _record(self, loss: float, asked: bool, steps: int, here: TimeTotals, everywhere: list[float]) -> Record:
        step, config = self.progress.step, self.config
        evaluates = step % config.eval_every == 0 or step == config.steps or asked
        if evaluates:
            self.evaluate()
        seconds, waited = here.step_seconds, here.blocked_seconds
        compute, blocked = everywhere
        return Record(
            step=step,
            loss=loss,
            eval_loss=self._eval_loss if evaluates else None,
            lr=config.lr * config.lr_factor(step - 1),
            seconds=self.progress.seconds,
            samples_per_second=steps * config.batch / seconds,
            blocked_share=waited / seconds,
            compute_seconds=compute,
            blocked_seconds=blocked,
            accuracy=self._accuracy if evaluates else None,
        )

    def _check_finite(self, loss: float, step: int) -> None:
        if not math.isfinite(loss):
            raise LossDiverged(f"the loss is {loss} at step {step}{self._last_good()}")

    def _last_good(self) -> str:
        self._settle()
        found = "there is no checkpoint yet"
        if self.last_checkpoint is not None:
            found = f"the last good checkpoint is {self.last_checkpoint}"
        return f": {found}. A smaller lr, a warmup or max_grad_norm may help"

    def _save(self) -> None:
        """A checkpoint, which rank 0 writes while training goes on. What goes wrong there is raised on all ranks, at
        the next one or at the end.
        """
        if self.checkpoints is None:
            return
        tensors = checkpoint.gather_state(self.optimizer)
        # A finite loss does not vouch for the update after it. All ranks hold the same tensors, so all find the same.
        bad = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
        if bad:
            raise LossDiverged(f"{bad[0]} is not finite after step {self.progress.step}{self._last_good()}")
        self._settle()  # one at a time
        self._writing = True
        if self.parallel.rank == 0:
            self._written = self._writer.submit(checkpoint.write, tensors, self.config, self.progress, self.checkpoints)

    def _settle(self) -> None:
        """Wait for the checkpoint that is being written, if one is."""
        if not self._writing:
            return
        self._writing = False
        told: list[Any] = [None]
        if self._written is not None:
            try:
                told = [self._written.result()]
            except (OSError, SafetensorError) as error:
                told = [OSError(f"a checkpoint in {self.checkpoints} cannot be written: {error}")]
        if not self.parallel.single_process:
            dist.broadcast_object_list(told, src=0, group=self.parallel.group, device=self.parallel.device)
        if isinstance(told[0], OSError):
            raise told[0]
        self.last_checkpoint = told[0]

    def _summary(self, status: Status, record: Record, spent: TimeTotals, steps: int) -> Summary:
        seconds, waited = spent.step_seconds, spent.blocked_seconds
        return Summary(
            status=status,
            step=self.progress.step,
            loss=record.loss,
            eval_loss=self._eval_loss,
            seconds=self.progress.seconds,
            samples_per_second=steps * self.config.batch / seconds if seconds else 0.0,
            blocked_share=waited / seconds if seconds else 0.0,
            compute_seconds=record.compute_seconds,
            blocked_seconds=record.blocked_seconds,
            parameters=sum(parameter.numel() for parameter in self.task.model.parameters()),
            checkpoint=None if self.last_checkpoint is None else str(self.last_checkpoint),
            accuracy=self._accuracy,
        )
