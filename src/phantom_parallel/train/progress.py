"""What a user sees meanwhile: a bar on a terminal, lines elsewhere. On stderr, since results go to stdout."""

from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from phantom_parallel.train.config import TrainConfig
from phantom_parallel.train.loop import Record


class ProgressDisplay:
    """Step, loss, rate, share of time blocked in exchanges, and the time left if the target is not reached sooner."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._eval_loss: float | None = None
        self._bar = Progress(BarColumn(), TextColumn("{task.description}"), console=self._console)
        self._task = self._bar.add_task("starting", total=config.steps)

    def __enter__(self) -> "ProgressDisplay":
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def show(self, record: Record) -> None:
        if record.eval_loss is not None:
            self._eval_loss = record.eval_loss
        if self._console.is_terminal:
            self._bar.update(self._task, completed=record.step, description=self._line(record))
        else:
            self._console.print(self._line(record))

    def _line(self, record: Record) -> str:
        held_out = "" if self._eval_loss is None else f"  held out {self._eval_loss:.4g}"
        left = (self._config.steps - record.step) * self._config.batch / record.samples_per_second
        return (
            f"step {record.step}/{self._config.steps}  loss {record.loss:.4g}{held_out}  "
            f"{record.samples_per_second:,.0f} {self._config.row}s/s  {record.blocked_share:.0%} in exchanges  "
            f"{timedelta(seconds=round(left))} left"
        )
