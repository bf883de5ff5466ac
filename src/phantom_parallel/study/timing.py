"""Timing of training steps: a few that warm up, then some that are timed, with the losses that they had."""

import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from phantom_parallel.distributed.context import ParallelContext
from phantom_parallel.distributed.errors import Interrupted, LossDiverged
from phantom_parallel.distributed.objects import broadcast_from_rank_zero
from phantom_parallel.distributed.signals import StopRequest
from phantom_parallel.energy import EnergyMeter
from phantom_parallel.train.config import TrainConfig
from phantom_parallel.train.loop import Record, Trainer

WARM_UP = (
    2  # steps before those that are timed, or one if time is limited: buffers are allocated and connections opened
)
LEAST = 2  # steps that are timed at least
_NEVER = 10**9


@dataclass(frozen=True)
class TimedSteps:
    """What timed steps took; sums over all ranks but for ``seconds``, which are rank 0's."""

    steps: int
    seconds: float
    compute_seconds: float | None  # None where the time is not split, see `Record`
    blocked_seconds: float | None
    measured_joules: float | None
    measured_by: str
    losses: tuple[float, ...]  # of the last step that warmed up and of the last that was timed: on its rows, held out


def time_steps(
    config: TrainConfig,
    context: ParallelContext,
    steps: int,
    stop: StopRequest,
    *,
    limit: float = math.inf,
    report: Callable[[Record], None],
) -> TimedSteps | None:
    """Train for a few steps on the ranks of ``context`` and time the last ``steps`` of them, without evaluations.

    Ranks meet for nothing but the model between the first and the last timed step. Held out is one batch.

    Args:
        config: The training.
        context: Its ranks; every one of them calls this.
        steps: Steps to time.
        stop: Whether a signal asked to stop.
        limit: Seconds that they may take: of slow steps, fewer are timed, and `LEAST` at least.
        report: Called on rank 0 after the steps that warm up and after those that are timed.

    Returns:
        The times, the same on every rank but for ``seconds``; None if the loss was not finite.

    Raises:
        Interrupted: If a signal asked to stop.
    """
    warm_up = WARM_UP if math.isinf(limit) else 1
    quiet = replace(config, steps=warm_up, warmup=0, target_loss=None, log_every=_NEVER, eval_every=_NEVER)
    with ExitStack() as stack:
        trainer = Trainer(quiet, context, None)
        stack.push(trainer.close)
        trainer.task.held_out = trainer.task.held_out[: config.batch]
        if config.compile:
            trainer.compile()
        stack.callback(trainer.clock.stop)
        trainer.clock.start()
        meter = EnergyMeter(None if context.single_process else context.group, device=context.device)
        try:
            summaries = [trainer.run(stop, report)]
            before = trainer.progress.seconds
            affordable = _affordable(limit, before / warm_up, context)
            steps = min(steps, max(LEAST, affordable))
            trainer.config = replace(quiet, steps=warm_up + steps)
            if summaries[-1].status != "interrupted":
                with meter.window("steps") as window:
                    summaries.append(trainer.run(stop, report))
        except LossDiverged:
            return None
        if summaries[-1].status == "interrupted":
            raise Interrupted("stopped by a signal")
        last, total = summaries[-1], window.result.total
        return TimedSteps(
            steps=steps,
            seconds=trainer.progress.seconds - before,
            compute_seconds=last.compute_seconds,
            blocked_seconds=last.blocked_seconds,
            measured_joules=total.joules if total.valid else None,
            measured_by=str(total.provenance),
            losses=tuple(loss for one in summaries for loss in (one.loss, one.eval_loss) if loss is not None),
        )


def _affordable(limit: float, step_seconds: float, context: ParallelContext) -> int:
    """How many steps fit into ``limit`` seconds by rank 0's clock, the same on every rank."""
    if math.isinf(limit) or step_seconds <= 0:
        return sys.maxsize
    count = int(limit / step_seconds)
    group = None if context.single_process else context.group
    return count if context.single_process else broadcast_from_rank_zero(lambda: count, context.device, group)
