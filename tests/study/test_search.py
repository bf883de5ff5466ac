"""The search for a learning rate, with trainings whose results are known."""

from dataclasses import replace

import pytest

from phantom_parallel.families.ffn.config import FFNTrainConfig
from phantom_parallel.study.grid import mark_best, next_rate, search
from phantom_parallel.study.results import Run, Trial
from phantom_parallel.study.settings import SearchSettings

CONFIG = FFNTrainConfig.of(width=16, depth=1, strategy="tensor", samples=64, batch=8)


class KnownTrainings:
    """A runner that knows how many steps each learning rate needs to the target, and the loss where there is none."""

    def __init__(self, needs: dict[float, int]) -> None:
        self.needs, self.trained = needs, []

    def train(self, name: str, config: FFNTrainConfig) -> Run:
        self.trained.append((name, config.lr, config.steps))
        needed = self.needs[config.lr]
        reached = needed <= config.steps
        return Run(0, config.lr, "target" if reached else "steps", min(needed, config.steps), needed / 1000)


def candidate(*, lr: float, steps: int) -> FFNTrainConfig:
    return replace(CONFIG, lr=lr, steps=steps)


def chosen(runner: KnownTrainings, settings: SearchSettings) -> float:
    trials = search({"tensor": candidate}, settings, runner.train)
    return next(trial.lr for trial in trials["tensor"] if trial.chosen)


@pytest.mark.parametrize(
    ("needs", "rates", "extend", "best", "tried"),
    [
        ({0.1: 50, 0.2: 30, 0.4: 90}, (0.1, 0.2, 0.4), 2, 0.2, [100, 50, 30]),  # hopeless trials stop early
        ({0.1: 500, 0.2: 900, 0.4: 700}, (0.1, 0.2, 0.4), 0, 0.1, [100, 100, 100]),  # no target: the lowest loss
        ({0.1: 80, 0.2: 60, 0.4: 40, 0.8: 20, 1.6: 70}, (0.1, 0.2), 5, 0.8, [100, 80, 60, 40, 20]),
        ({0.1: 80, 0.2: 90, 0.05: 60, 0.025: 70}, (0.1, 0.2), 5, 0.05, [100, 80, 80, 60]),
        ({0.1: 80, 0.2: 60, 0.4: 40, 0.8: 20}, (0.1, 0.2), 1, 0.4, [100, 80, 60]),  # no further than allowed
    ],
)
def test_fewest_steps_to_the_target_win_and_the_list_is_extended_at_its_ends(needs, rates, extend, best, tried):
    runner = KnownTrainings(needs)
    assert chosen(runner, SearchSettings(rates, steps=100, extend=extend)) == best
    assert [steps for _, _, steps in runner.trained] == tried


def test_a_diverged_trial_is_never_the_best():
    trials = [Trial("tensor", 0.1, "steps", 10, 9.0), Trial("tensor", 0.2, "diverged", 10, None)]
    assert [trial.chosen for trial in mark_best(trials)] == [True, False]
    assert next_rate(trials, SearchSettings((0.1, 0.2))) == pytest.approx(0.05)


def test_candidates_take_turns():
    runner = KnownTrainings({0.1: 50, 0.2: 30, 0.4: 90})
    search({"a": candidate, "b": candidate}, SearchSettings((0.1, 0.2, 0.4), steps=100), runner.train)
    assert [name.split()[1] for name, _, _ in runner.trained] == ["a", "b"] * 3
