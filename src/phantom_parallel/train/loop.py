"""The loop: steps until the number of them or the target loss is reached, on ranks that exist already.

Apart from the model's own collectives, ranks communicate only at *boundaries*, the steps that log, evaluate or save,
where they reduce the loss and check that it is finite, and about twice a second to agree on whether one of them was
asked to stop or could not write a checkpoint, which makes a boundary as well. Other steps are what a user's own loop
would be, and their time is the time that is reported.
"""

import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from phantom_parallel.checkpoint.shards import storage_group
from phantom_parallel.distributed.objects import all_gather_objects, on_every_rank
from phantom_parallel.distributed.process_group import ParallelContext, describe_run
from phantom_parallel.distributed.signals import LossDiverged, StopRequest
from phantom_parallel.energy.time_split import TimeSplitRecorder, TimeTotals, can_split_time
from phantom_parallel.train import checkpoint
from phantom_parallel.train.checkpoint import BackgroundWriter, Progress
from phantom_parallel.train.config import TrainConfig
from phantom_parallel.train.optimizer import PartsOptimizer
from phantom_parallel.train.task import Task
from phantom_parallel.utils.files import cache_folder
from phantom_parallel.utils.timers import timer_for

Status = Literal["target", "steps", "interrupted"]
POLL_SECONDS = 0.5  # between two agreements on whether a rank wants a boundary


@dataclass(frozen=True)
class Record:
    """What is known at a boundary. Rates and shares are rank 0's, since the record before; ``compute_seconds`` and
    ``blocked_seconds`` are sums over all ranks since the training began or was resumed. Where the waits of a training
    cannot be observed (FSDP2 on an accelerator), its time is not split, and the three are None.
    """

    step: int
    loss: float
    eval_loss: float | None
    lr: float
    seconds: float
    samples_per_second: float
    blocked_share: float | None
    compute_seconds: float | None
    blocked_seconds: float | None
    accuracy: float | None = None  # of the held-out rows, where they have classes
    teacher_loss: float | None = None  # held-out loss of the model that is learned from, where there is one


@dataclass(frozen=True, kw_only=True)
class Summary(Record):
    """How a training ended: the last record, with the latest held-out loss and accuracy, and rates since the training
    began or was resumed. ``seconds`` are those of its steps alone: neither evaluation nor saving.
    """

    status: Status
    parameters: int
    checkpoint: str | None
    initial_loss: float | None = None  # held-out loss before the first step, where it was measured
    run: dict[str, Any] | None = None  # ranks, hosts, device, backend and torch, as `describe_run` has them


def train(
    config: TrainConfig,
    parallel: ParallelContext,
    *,
    checkpoints: Path | None = None,
    resume: Path | None = None,
    report: Callable[[Record], None] | None = None,
    finish: Callable[[Task[Any]], None] | None = None,
) -> tuple[Any, Summary]:
    """Train on the ranks of ``parallel``; every one of them calls this.

    Args:
        config: The training.
        parallel: Its ranks.
        checkpoints: Folder for checkpoints; None to write none.
        resume: A checkpoint to continue from. If the training ended there, nothing is trained.
        report: Called on rank 0 at every boundary.
        finish: Called on every rank with the task, once it is trained.

    Returns:
        The model, with its parameters sharded as they were trained, and how the training ended.

    Raises:
        LossDiverged: If the loss or a weight is not finite; ValueError, if it is so because of the data.
        OSError: On every rank, within half a second or after the step, if a checkpoint could not be written.
    """
    with ExitStack() as stack:
        trainer = Trainer(config, parallel, checkpoints)
        stack.push(trainer.close)
        if resume is not None and (summary := trainer.resume(resume)) is not None:
            return trainer.task.model, summary
        if config.compile:
            trainer.compile()
        stack.enter_context(trainer.clock)
        stop = stack.enter_context(StopRequest())
        summary = trainer.run(stop, report)
        if finish is not None and summary.status != "interrupted":
            finish(trainer.task)
        return trainer.task.model, summary


class Trainer:
    """A task and its optimizer, at some step."""

    def __init__(self, config: TrainConfig, parallel: ParallelContext, checkpoints: Path | None) -> None:
        self.config, self.parallel, self.checkpoints = config, parallel, checkpoints
        torch.manual_seed(config.seed)
        self.task: Task[Any] = config.task()(config, parallel)
        cut = self.task.sharded_over_copies
        self.optimizer = PartsOptimizer(self.task.model, config, parallel, sharded_over_copies=cut)
        outline = config.task().outline(config)
        self.parameters = sum(parameter.numel() for parameter in outline.parameters())  # of the whole model
        self.clock = TimeSplitRecorder(parallel.device.type, timer_for(parallel.device))
        self._splits_time = can_split_time(self.task.model, parallel.device)
        self.progress = Progress(0, 0.0)
        self.last_checkpoint: Path | None = None
        self._eval_loss: float | None = None
        self._accuracy: float | None = None
        self._last_boundary = 0  # the step of the last boundary at which all was finite
        self._polled = 0, time.monotonic()  # step and time at which ranks agreed on whether one wants a boundary
        self._next_poll = 0
        self._group = None if parallel.single_process else parallel.group or dist.group.WORLD
        self._writer = None if checkpoints is None else BackgroundWriter(self._group)

    def resume(self, path: Path) -> Summary | None:
        """Load a checkpoint; how the training ended, if it ended there."""
        self.progress = checkpoint.load(path, self.optimizer, self.config, storage_group(self._group))
        self._last_boundary = self.progress.step
        self.last_checkpoint = path
        summary = self.progress.summary
        return None if summary is None else Summary(**summary | {"checkpoint": str(path)})

    def compile(self) -> None:
        """Compile both directions now, on rows of the usual shape, so that no step's time has it in it."""
        # Torch's default is a folder of a well-known name that another user may have made, and code there is run.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))
        self.task.compile()
        self.task.forward_backward(self.task.rows_of(0)[: self.config.micro_batch], 1.0, last=True)
        self.task.model.zero_grad()

    def close(self, kind: type[BaseException] | None, *exception: object) -> None:
        """Let the checkpoint that is being written be completed, whatever ended the training."""
        if self._writer is not None:
            self._writer.close(failed=kind is not None and not issubclass(kind, LossDiverged | OSError))

    def run(self, stop: StopRequest, report: Callable[[Record], None] | None) -> Summary:
        config, before, first = self.config, self.progress.seconds, self.progress.step
        start = last = self.clock.totals()
        record, last_step = None, first
        status: Status = "steps"
        self._polled, self._next_poll = (first, time.monotonic()), first + 1
        for step in range(first + 1, config.steps + 1):
            with self.clock.step():
                loss = self._step(step - 1)
            every = (config.log_every, config.eval_every, config.checkpoint_every)
            failed = self._writer is not None and self._writer.failed
            wanted = self._boundary_wanted(step, stop.requested or failed)
            if not wanted and step < config.steps and all(step % interval for interval in every):
                continue
            now = self.clock.totals()
            ran = now.since(start)
            share = loss / config.row_shards if self.task.counts else 0.0 * loss
            compute, blocked = ran.step_seconds - ran.blocked_seconds, ran.blocked_seconds
            total, asked, failures, *spent = self.sum_over_ranks(share, stop.requested, failed, compute, blocked)
            if failures:
                self._settle()  # raises on all ranks: a write fails on all of them
            self.progress = Progress(step, before + ran.step_seconds, self.task.digest)
            self._check_finite(total)
            record = self._record(total, step - last_step, now.since(last), spent)
            self._check_finite(record.eval_loss or 0.0, "held-out loss")
            last, last_step = now, step
            self._last_boundary = step
            if report is not None:  # if the disk of rank 0 is full, all ranks stop together
                on_every_rank(partial(report, record) if self.parallel.rank == 0 else lambda: None, self._group)
            reached = record.eval_loss is not None and record.eval_loss <= (config.target_loss or -1.0)
            if reached or asked or step == config.steps:
                status = "target" if reached else "interrupted" if asked and step < config.steps else "steps"
                break
            if step % config.checkpoint_every == 0:
                self._save()
        assert record is not None  # the last step is a boundary, and a checkpoint of it is not resumed
        summary = self._summary(status, record, self.clock.totals().since(start), self.progress.step - first)
        if status != "interrupted":
            self.progress = replace(self.progress, summary=asdict(summary))
        self._save()
        self._settle()
        return summary

    def _step(self, step: int) -> Tensor:
        """One step; this rank's share of the loss before it, not yet summed."""
        config, rows = self.config, self._rows(step)
        total = torch.zeros((), device=self.parallel.device)
        pieces = rows.chunk(config.gradient_accumulation_steps)
        for index, piece in enumerate(pieces, 1):
            total += self.task.forward_backward(piece, len(piece) / len(rows), last=index == len(pieces))
            if self.parallel.device.type != "cpu":
                following = pieces[index:] or self._rows(step + 1).chunk(config.gradient_accumulation_steps)
                self.task.prefetch(following[0])
        self.task.average()
        if self.task.new_objective(step):
            self.optimizer.forget()
        self.optimizer.step(config.lr_factor(step))
        return total

    def _rows(self, step: int) -> Tensor:
        """This rank's rows of a step."""
        return self.task.rows_of(step).chunk(self.config.row_shards)[self._row_shard]

    @property
    def _row_shard(self) -> int:
        """Which of the shares of rows this rank has."""
        own = self.config.row_shards // self.config.dp
        return self.parallel.dp_rank * own + (self.parallel.tp_rank if own > 1 else 0)

    @torch.no_grad()
    def evaluate(self) -> None:
        """The mean loss of the held-out rows, and their accuracy; each copy, or each rank that has rows of its own,
        takes a part of them, in as many pieces as the others do.
        """
        held, config = self.task.held_out, self.config
        pieces = math.ceil(math.ceil(len(held) / config.row_shards) / config.micro_batch)
        sums = torch.zeros(2, device=self.parallel.device)
        for piece in held.tensor_split(config.row_shards)[self._row_shard].tensor_split(pieces):
            sums += self.task.measure(piece)
        loss, hits = self.sum_over_ranks(sums[0] if self.task.counts else 0.0 * sums[0], float(sums[1]))
        self._eval_loss = loss / len(held)
        self._accuracy = hits / len(held) if self.task.classifies else None

    def sum_over_ranks(self, value: Tensor, *more: float) -> list[float]:
        """Numbers, each summed over all ranks."""
        numbers = torch.stack([value.double(), *value.new_tensor(more, dtype=torch.float64)])
        if not self.parallel.single_process:
            dist.all_reduce(numbers, group=self.parallel.group)
        return numbers.tolist()

    def _record(self, loss: float, steps: int, here: TimeTotals, everywhere: list[float]) -> Record:
        step, config = self.progress.step, self.config
        evaluates = step % config.eval_every == 0 or step == config.steps
        if evaluates:
            self.evaluate()
        compute, blocked = everywhere if self._splits_time else (None, None)
        return Record(
            step=step,
            loss=loss,
            eval_loss=self._eval_loss if evaluates else None,
            lr=config.lr * config.lr_factor(step - 1),
            seconds=self.progress.seconds,
            samples_per_second=steps * config.batch / here.step_seconds,
            blocked_share=self._blocked_share(here),
            compute_seconds=compute,
            blocked_seconds=blocked,
            accuracy=self._accuracy if evaluates else None,
            teacher_loss=self.task.teacher_loss,
        )

    def _blocked_share(self, spent: TimeTotals) -> float | None:
        return spent.blocked_seconds / max(spent.step_seconds, 1e-9) if self._splits_time else None

    def _check_finite(self, loss: float, what: str = "loss") -> None:
        if not math.isfinite(loss):
            raise self._diverged(f"the {what} is {loss} at step {self.progress.step}")

    def _diverged(self, message: str) -> LossDiverged:
        """Return the error of a loss or a weight that is not finite; raise ValueError if data of the steps since the
        last boundary are not. Every rank calls this.
        """
        with suppress(OSError):
            self._settle()

        def check() -> None:
            # A step's update follows its loss, so data of the last boundary may have made the weights non-finite.
            for step in range(max(self._last_boundary - 1, 0), self.progress.step):
                self.task.check_rows(self._rows(step))

        try:
            on_every_rank(check, self._group)
        except ValueError as error:
            raise ValueError(f"{error}; {self._last_checkpoint()}") from None
        return LossDiverged(f"{message}: {self._last_checkpoint()}. A smaller lr, a warmup or max_grad_norm may help")

    def _last_checkpoint(self) -> str:
        if self.last_checkpoint is None:
            return "there is no checkpoint yet"
        return f"the last good checkpoint is {self.last_checkpoint}"

    def _save(self) -> None:
        """Write a checkpoint in the background: every rank copies its own part, and writes it while training goes on.

        A weight that is not finite is found before. What goes wrong later is raised on all ranks at the next boundary.
        """
        if self.checkpoints is None or self._writer is None:
            return
        parts = checkpoint.parts_of(self.optimizer)
        # The update after a finite loss may not be finite.
        own = next((name for name, part in parts.items() if not bool(part.values.isfinite().all())), None)
        if name := next(filter(None, all_gather_objects(own, self._group)), None):
            raise self._diverged(f"{name} is not finite after step {self.progress.step}")
        self._settle()  # one at a time
        staged, progress = checkpoint.stage(parts), self.progress
        config, folder, group = self.config, self.checkpoints, self._writer.group
        self._writer.start(lambda: checkpoint.write(staged, config, progress, folder, group))

    def _settle(self) -> None:
        """Wait for the checkpoint that is being written, if one is."""
        if self._writer is None:
            return
        try:
            self.last_checkpoint = self._writer.wait() or self.last_checkpoint
        except OSError as error:
            raise OSError(f"{error}; {self._last_checkpoint()}") from None

    def _boundary_wanted(self, step: int, here: bool) -> bool:
        """Whether a rank wants a boundary after ``step``, as far as the ranks know; ``here``: whether this one does.

        The steps at which ranks agree are the same on all: each agreement has the sum of the ranks' durations of a
        step, and the next follows as many steps later as fit into `POLL_SECONDS`.
        """
        if step < self._next_poll:
            return False
        (last, before), now = self._polled, time.monotonic()
        own = torch.tensor((now - before) / (step - last))  # on the host, which does not wait for a device
        seconds, wanting, ranks = self.sum_over_ranks(own, here, 1.0)
        self._polled, self._next_poll = (step, now), step + max(1, int(POLL_SECONDS * ranks / seconds))
        return wanting > 0

    def _summary(self, status: Status, record: Record, spent: TimeTotals, steps: int) -> Summary:
        path = self.last_checkpoint
        if self.checkpoints is not None:
            path = checkpoint.path_of(self.checkpoints, self.progress.step)
        latest = {
            "eval_loss": self._eval_loss,
            "accuracy": self._accuracy,
            "samples_per_second": steps * self.config.batch / max(spent.step_seconds, 1e-9),
            "blocked_share": self._blocked_share(spent),
            "status": status,
            "parameters": self.parameters,
            "checkpoint": None if path is None else str(path),
            "initial_loss": self.task.initial_loss,
            "run": describe_run(self.parallel.device),
        }
        return Summary(**asdict(record) | latest)
