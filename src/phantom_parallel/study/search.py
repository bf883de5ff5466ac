"""The search for a learning rate, the same for everything that is compared.

Rates are tried in ascending order, and beyond an end of the list while the best is at that end. A trial is better the
fewer steps it needs to the target; if there is no target, or it was not reached, the lower its held-out loss after the
steps of the search. A trial is stopped as soon as it cannot be the best: after the steps that the best one needed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from phantom_parallel.study.results import Run, Trial
from phantom_parallel.study.settings import SearchSettings
from phantom_parallel.train.config import TrainConfig


def search(
    candidates: Mapping[str, Callable[..., TrainConfig]],
    settings: SearchSettings,
    train: Callable[[str, TrainConfig], Run],
) -> dict[str, list[Trial]]:
    """Try learning rates for every candidate, in turns.

    Args:
        candidates: By the name of a model, its training, called with ``lr`` and ``steps``.
        settings: The rates and how long to try them.
        train: Runs a training of that name.

    Returns:
        The trials of each candidate in ascending order of the rate, with the best one marked.
    """
    trials: dict[str, list[Trial]] = {name: [] for name in candidates}
    pending = [(name, lr) for lr in settings.learning_rates for name in candidates]
    while pending:
        for name, lr in pending:
            steps = min([settings.steps, *(trial.steps for trial in trials[name] if trial.status == "target")])
            run = train(f"search {name} lr={lr:g}", candidates[name](lr=lr, steps=steps))
            trials[name].append(Trial(name, lr, run.status, run.steps, run.loss))
        further = {name: next_rate(tried, settings) for name, tried in trials.items()}
        pending = [(name, lr) for name, lr in further.items() if lr is not None]
    return {name: mark_best(tried) for name, tried in trials.items()}


def mark_best(trials: Sequence[Trial]) -> list[Trial]:
    """The trials in ascending order of the rate, with the best marked: of those that reached the target the one with
    the fewest steps, else the one with the lowest loss. Of two equals it is the one with the lower rate.
    """

    def key(trial: Trial) -> tuple[int, float, float]:
        loss = float("inf") if trial.loss is None else trial.loss
        return (0, trial.steps, loss) if trial.status == "target" else (1, loss, loss)

    ordered = sorted(trials, key=lambda trial: trial.lr)
    best = min(ordered, key=key)
    return [replace(trial, chosen=trial is best) for trial in ordered]


def next_rate(trials: Sequence[Trial], settings: SearchSettings) -> float | None:
    """The next learning rate beyond the end at which the best one is; None if it is not at an end, or the list may not
    be extended further.
    """
    rates = settings.learning_rates
    if len(rates) < 2 or len(trials) >= len(rates) + settings.extend:
        return None
    ordered, factor = mark_best(trials), rates[1] / rates[0]
    if ordered[-1].chosen:
        return float(f"{ordered[-1].lr * factor:.6g}")
    return float(f"{ordered[0].lr / factor:.6g}") if ordered[0].chosen else None
