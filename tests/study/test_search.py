"""The search for a learning rate, on a bench whose losses are known."""

from dataclasses import replace

import pytest

from phantom_parallel.families.ffn.train_config import FFNTrainConfig
from phantom_parallel.study.results import Run, Trial
from phantom_parallel.study.search import beyond, choose, search
from phantom_parallel.study.settings import Search

CONFIG = FFNTrainConfig(width=16, depth=1, strategy="tensor", samples=64, batch=8)


class Bench:
    """Knows how many steps each learning rate needs to the target, and the loss where there is none."""

    def __init__(self, needs: dict[float, int]) -> None:
        self.needs, self.asked = needs, []

    def training(self, name: str, config: FFNTrainConfig) -> Run:
        self.asked.append((name, config.lr, config.steps))
        needed = self.needs[config.lr]
        reached = needed <= config.steps
        return Run(
            strategy="tensor",
            seed=0,
            lr=config.lr,
            ranks=1,
            dp=1,
            status="target" if reached else "steps",
            steps=min(needed, config.steps),
            loss=needed / 1000,
            seconds=1.0,
            compute_seconds=1.0,
            blocked_seconds=0.0,
            joules=None,
            measured_joules=None,
            measured_by="unavailable",
        )


def arm(*, lr: float, steps: int) -> FFNTrainConfig:
    return replace(CONFIG, lr=lr, steps=steps)


def chosen(bench: Bench, settings: Search) -> float:
    found = search({"tensor": arm}, settings, bench, lambda trials: None)
    return next(one.lr for one in found["tensor"] if one.chosen)


def test_fewest_steps_to_the_target_win_and_hopeless_trials_stop_early():
    bench = Bench({0.1: 50, 0.2: 30, 0.4: 90})
    assert chosen(bench, Search((0.1, 0.2, 0.4), steps=100)) == 0.2
    assert [steps for _, _, steps in bench.asked] == [100, 50, 30]


def test_without_a_target_the_lowest_loss_wins():
    assert chosen(Bench({0.1: 500, 0.2: 900, 0.4: 700}), Search((0.1, 0.2, 0.4), steps=100, extend=0)) == 0.1


def test_the_list_goes_on_where_the_best_lies_at_its_end():
    bench = Bench({0.1: 80, 0.2: 60, 0.4: 40, 0.8: 20, 1.6: 70})
    assert chosen(bench, Search((0.1, 0.2), steps=100, extend=5)) == 0.8
    assert [lr for _, lr, _ in bench.asked] == [0.1, 0.2, 0.4, 0.8, 1.6]
    down = Bench({0.1: 80, 0.2: 90, 0.05: 60, 0.025: 70})
    assert chosen(down, Search((0.1, 0.2), steps=100, extend=5)) == 0.05


def test_the_list_goes_on_no_further_than_allowed():
    bench = Bench({0.1: 80, 0.2: 60, 0.4: 40, 0.8: 20})
    assert chosen(bench, Search((0.1, 0.2), steps=100, extend=1)) == 0.4


def test_a_diverged_trial_is_never_the_best():
    trials = [Trial("tensor", 0.1, "steps", 10, 9.0), Trial("tensor", 0.2, "diverged", 10, None)]
    assert [one.chosen for one in choose(trials)] == [True, False]
    assert beyond(trials, Search((0.1, 0.2))) == pytest.approx(0.05)


def test_arms_take_turns():
    bench = Bench({0.1: 50, 0.2: 30, 0.4: 90})
    search({"a": arm, "b": arm}, Search((0.1, 0.2, 0.4), steps=100), bench, lambda trials: None)
    assert [name.split()[1] for name, _, _ in bench.asked] == ["a", "b"] * 3
