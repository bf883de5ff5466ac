"""Curves that contenders share: those that compute the same model have the same losses after the same steps.

Such contenders share one search for a learning rate and one training for each seed, by the one with the shortest step.
That they compute the same model is checked on the losses of a few steps of each. What a step takes is measured for each
of them, and the time to the loss is the steps to the loss times its own time of a step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from phantom_parallel.study.contenders import Contender, by_function
from phantom_parallel.study.results import CurvePoint, Run, SharedModel, Timing
from phantom_parallel.study.timing import WARM_UP

# Largest relative difference of losses that is rounding, by the precision of products. Orders of summation differ, and
# the optimizer divides gradients by their own size, so that rounding of the smallest ones grows with the steps.
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}


def models_of(contenders: Sequence[Contender], share: bool) -> dict[str, list[Contender]]:
    """Contenders by the model that they compute. A model of one contender alone has the name of that contender."""
    groups = by_function(contenders) if share else {one.name: [one] for one in contenders}
    return {group[0].name if len(group) == 1 else model: group for model, group in groups.items()}


def fastest(layouts: Sequence[Contender], timings: Mapping[Contender, Timing]) -> Contender:
    """The one with the shortest step; those that diverged or were not timed come last."""
    return min(layouts, key=lambda one: _step_seconds(timings.get(one)))


def _step_seconds(timing: Timing | None) -> float:
    seconds = None if timing is None else timing.step_seconds
    return math.inf if seconds is None else seconds


def check_same_model(model: str, timings: Sequence[Timing], tolerance: float) -> SharedModel:
    """Compare the losses of contenders that should compute the same model with the medians over them.

    Args:
        model: Name of the model.
        timings: Of each contender, the same steps with the same seed and learning rate.
        tolerance: The largest relative difference that is rounding.
    """
    middle = [median(losses) for losses in zip(*(one.losses for one in timings if one.losses), strict=True)]
    differences = {one.strategy: _difference(one.losses, middle) for one in timings}
    steps = WARM_UP + max(one.steps for one in timings)
    found = SharedModel(model, tuple(differences), timings[0].strategy, steps, tolerance, differences)
    equal = [one for one in timings if one.strategy not in found.differing]
    return replace(found, trained_by=min(equal or timings, key=_step_seconds).strategy)


def _difference(losses: Sequence[float], others: Sequence[float]) -> float | None:
    if not losses or len(losses) != len(others):
        return None
    return max(abs(loss - other) / max(abs(other), 1e-30) for loss, other in zip(losses, others, strict=True))


def shared_run(run: Run, timing: Timing, one: Contender, *, differs: bool = False) -> Run:
    """The training of a contender, made of the steps and losses of ``run`` and of its own time of a step.

    Args:
        run: A training of the same model with the same seed.
        timing: Timed steps of the contender.
        one: The contender.
        differs: Whether the contender was found to compute another model, so that the losses are not its own.
    """
    found = replace(
        run,
        strategy=one.name,
        ranks=one.ranks,
        dp=one.dp,
        trained_by=None if run.strategy == one.name else run.strategy,
        timed_steps=timing.steps,
        measured_by=timing.measured_by,
        curve=(),
    )
    if not timing.steps:
        nothing = replace(found, steps=0, seconds=0.0, compute_seconds=0.0, blocked_seconds=0.0)
        return replace(nothing, status="diverged", loss=None, joules=None, measured_joules=None)
    each, steps = timing.seconds / timing.steps, run.steps
    totals = (timing.compute_seconds, timing.blocked_seconds, timing.joules, timing.measured_joules)
    compute, blocked, joules, measured = (None if total is None else total / timing.steps for total in totals)
    curve = tuple(
        CurvePoint(at.step, at.loss, at.step * each, None if joules is None else at.step * joules) for at in run.curve
    )
    return replace(
        found,
        status="differs" if differs else run.status,
        loss=None if differs else run.loss,
        seconds=steps * each,
        compute_seconds=None if compute is None else steps * compute,
        blocked_seconds=None if blocked is None else steps * blocked,
        joules=None if joules is None else steps * joules,
        measured_joules=None if measured is None else steps * measured,
        curve=() if differs else curve,
    )
