"""The search for a learning rate, the same for everything that is compared.

Rates are tried from the lowest to the highest, and past an end of the list while the best lies there. What counts is
the number of steps to the target; where none is given or reached, the held-out loss after the search's steps. A trial
stops where it can no longer be the best: after as many steps as the best needed to the target.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from phantom_parallel.study.results import Trial
from phantom_parallel.study.runner import Lab
from phantom_parallel.study.settings import Search
from phantom_parallel.train.config import TrainConfig


class Arm(Protocol):
    """One of the things that are compared: its training with a learning rate, for a number of steps."""

    def __call__(self, *, lr: float, steps: int) -> TrainConfig: ...


def search(
    arms: Mapping[str, Arm], settings: Search, lab: Lab, expect: Callable[[int], None]
) -> dict[str, list[Trial]]:
    """Each arm's trials by learning rate, the best marked. ``expect`` hears how many trials there will be, as far as is
    known. Arms take turns.
    """
    found: dict[str, list[Trial]] = {name: [] for name in arms}
    todo = [(name, lr) for lr in settings.learning_rates for name in arms]
    extended = dict.fromkeys(arms, 0)
    while todo:
        expect(sum(map(len, found.values())) + len(todo))
        for name, lr in todo:
            steps = min([settings.steps, *(trial.steps for trial in found[name] if trial.status == "target")])
            run = lab.training(f"search {name} lr={lr:g}", arms[name](lr=lr, steps=steps))
            found[name].append(Trial(name, lr, run.status, run.steps, run.loss))
        todo = []
        for name, trials in found.items():
            further = beyond(trials, settings)
            if further is not None and extended[name] < settings.extend:
                extended[name] += 1
                todo.append((name, further))
    return {name: choose(trials) for name, trials in found.items()}


def order(trial: Trial) -> tuple[int, float, float]:
    """Sorts trials, best first: by steps to the target among those that reached it, then by loss."""
    loss = float("inf") if trial.loss is None else trial.loss
    return (0, trial.steps, loss) if trial.status == "target" else (1, loss, loss)


def choose(trials: Sequence[Trial]) -> list[Trial]:
    """One arm's trials by learning rate, the best marked; the lower rate of two that are as good."""
    ordered = sorted(trials, key=lambda one: one.lr)
    best = min(ordered, key=order)
    return [replace(one, chosen=one is best) for one in ordered]


def beyond(trials: Sequence[Trial], settings: Search) -> float | None:
    """The next learning rate past the end at which the best one lies; None where it lies within."""
    rates = settings.learning_rates
    if len(rates) < 2:
        return None
    ordered, factor = choose(trials), rates[1] / rates[0]
    if ordered[-1].chosen:
        return float(f"{ordered[-1].lr * factor:.6g}")
    if ordered[0].chosen:
        return float(f"{ordered[0].lr / factor:.6g}")
    return None
