"""Blocks and ghosts for a task and a machine: steps to a loss are measured, and the time of a step is modelled.

What a phantom model computes depends on its blocks and ghosts and not on ranks, so that trainings in one process tell
how many steps it needs to a loss, and the planner what a step costs on the target machine.

candidates  blocks and ghosts whose best layout on the machine has a cheaper step than the best one of the dense model
dense       a search for the learning rate, and a training for each seed; their loss is the target unless one is given
rungs       every candidate has the same search in short trainings. The half with the least estimated cost to the loss
            is trained twice as long, and so on: at equal loss, its steps over those of the dense model, times its step
finals      the best are trained to the target, once for each seed
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from phantom_parallel.cost.planner import Candidate, Layout, ModelSizes, PlanRequest, plan
from phantom_parallel.cost.terms import optimizer_of
from phantom_parallel.distributed.launch import launch
from phantom_parallel.study.analysis import ratio_interval
from phantom_parallel.study.contenders import Contender
from phantom_parallel.study.grid import in_turn, search, to_target
from phantom_parallel.study.results import Run
from phantom_parallel.study.runner import RunOptions, cell_runner, prepare_folder
from phantom_parallel.study.settings import Settings
from phantom_parallel.study.units import Interval
from phantom_parallel.train.config import TrainConfig
from phantom_parallel.utils.files import FolderLock

RESULT = "tune.json"
EQUAL = Interval(1.0, None, None, 1)
FINALISTS = 3
AT_MOST = 3  # times the dense model's steps that a phantom model is trained for
# Parts of the budget: for the dense model's seeds, for searches of phantom models, and up to the last rung.
_DENSE_SHARE, _SEARCH_SHARE, _RUNGS_SHARE = 0.25, 0.3, 0.6


@dataclass(frozen=True)
class Tuned:
    """A phantom model: its steps to the loss and its cost there, relative to the dense model in its best layout."""

    blocks: int
    ghosts: int
    layout: Candidate  # the best on the machine
    dense: Candidate
    goal: str
    steps: Interval | None = EQUAL  # over seeds; without an interval where it is an estimate or there is one seed
    estimated: bool = True  # whether the steps are those to the loss of a short training, and not to the target
    reached: bool = False  # whether it reached the target with every seed

    @property
    def time(self) -> Interval | None:
        return self._times(self.layout.seconds / self.dense.seconds)

    @property
    def energy(self) -> Interval | None:
        known = self.layout.joules and self.dense.joules
        return self._times(self.layout.joules / self.dense.joules) if known else None  # type: ignore[operator]

    @property
    def cost(self) -> Interval | None:
        """The cost to the loss, in the measure of the goal."""
        return self.time if self.goal == "time" else self.energy

    def _times(self, factor: float) -> Interval | None:
        if self.steps is None:
            return None
        low, high = (None if end is None else end * factor for end in (self.steps.low, self.steps.high))
        return Interval(self.steps.mean * factor, low, high, self.steps.count)

    def to_dict(self) -> dict[str, Any]:
        """The model, its layout and its figures as plain data."""
        ratios = {"steps_ratio": self.steps, "time_ratio": self.time, "energy_ratio": self.energy}
        return {
            **self.layout.layout._asdict(),
            "step_seconds": self.layout.seconds,
            "modelled_joules_per_step": self.layout.joules,
            "reached": self.reached,
            "estimated": self.estimated,
            **{name: None if ratio is None else asdict(ratio) for name, ratio in ratios.items()},
        }


@dataclass(frozen=True)
class TuneResult:
    """What was measured: the target, the dense model's steps to it, and the phantom models, the cheapest first."""

    request: PlanRequest
    dense: Candidate
    target: float | None
    dense_steps: tuple[int, ...]
    rates: Mapping[str, float]  # by the name of a model
    models: tuple[Tuned, ...]
    skipped: int  # candidates whose step is not cheaper than the dense model's

    @property
    def best(self) -> Tuned | None:
        """The cheapest of the models that reached the target."""
        return next((model for model in self.models if model.reached), None)

    @property
    def pays(self) -> bool:
        """Whether a phantom model is cheaper to the loss, and its interval says so."""
        cost = self.best.cost if self.best else None
        return cost is not None and cost.high is not None and cost.high < 1


def sizes_of(config: TrainConfig) -> ModelSizes:
    """The sizes of a training's model, for the planner."""
    own = asdict(config.model)
    settings = {name: value for name, value in own.items() if name not in (*Layout._fields, "low_rank")}
    return ModelSizes(config.family, settings | {"optimizer": optimizer_of(config.optimizer, config.momentum)})


def _candidates(
    settings: Settings, request: PlanRequest, grid: Iterable[tuple[int, int]], dense: Candidate
) -> list[Tuned]:
    """The phantom models of these blocks and ghosts that fit, each in its best layout."""
    models, reasons = [], []
    for blocks, ghosts in grid:
        try:
            replace(
                settings, cells=({"strategy": "phantom", "blocks": blocks, "ghosts": ghosts},)
            )  # refuses models that are not possible
            own = replace(request, strategy=("phantom",), blocks=(blocks,), ghosts=(ghosts,))
            models.append(Tuned(blocks, ghosts, plan(own).best_of_each[0], dense, request.goal))
        except ValueError as error:
            reasons.append(str(error))
    if not models:
        raise ValueError(f"no phantom model of these blocks and ghosts is possible: {reasons[0]}")
    return models


def tune(
    settings: Settings,
    request: PlanRequest,
    grid: Iterable[tuple[int, int]],
    out: Path,
    *,
    minutes: float = 20.0,
    resume: bool = False,
    show: bool = False,
) -> TuneResult:
    """Find the blocks and ghosts that reach the dense model's loss at the least cost on a machine.

    Args:
        settings: The training, its steps, target, seeds and search, without cells.
        request: The model, the machine, the batch and the goal.
        grid: Blocks and ghosts to try.
        out: Folder for finished trainings; new or empty unless ``resume``.
        minutes: About how long steps may take. A training that has begun is finished.
        resume: Whether to continue in ``out``.
        show: Whether to show progress on stderr.
    """
    others = tuple(name for name in request.strategy if name != "phantom")
    dense = plan(replace(request, strategy=others)).best_dense
    assert dense is not None
    models = _candidates(settings, request, grid, dense)
    cheaper = [model for model in models if model.cost and model.cost.mean < 1]
    cells = [{"strategy": "phantom", "blocks": model.blocks, "ghosts": model.ghosts} for model in cheaper]
    settings = replace(settings, cells=({"strategy": "dense"}, *cells))
    first = settings.configs()[0]
    first.task().check(first)
    with FolderLock(out) as lock:
        prepare_folder(out, settings.to_dict(), resume, lock)
        untrained = tuple(replace(model, steps=None) for model in models)
        result = TuneResult(request, dense, settings.target_loss, (), {}, untrained, len(models) - len(cheaper))
        if cheaper:
            result = launch(1, _measure, settings, RunOptions(out, resume, show), result, cheaper, 60 * minutes)
    return result


def _measure(
    device: torch.device,
    settings: Settings,
    options: RunOptions,
    result: TuneResult,
    models: Sequence[Tuned],
    budget: float,
) -> TuneResult:
    finished: dict[str, Run] = {}
    with cell_runner(device, settings, options) as runner:

        def train(name: str, config: TrainConfig) -> Run:
            if name not in finished:
                finished[name] = runner.train(name, config)
            return finished[name]

        def spent() -> float:  # in steps, which a folder has too: a resumed call decides as the first one did
            return sum(run.seconds for run in finished.values())

        def search_rates(contenders: Sequence[Contender]) -> dict[str, float]:
            trained = {each.label: partial(settings.config, each, seed=settings.search.seed) for each in contenders}
            tried = search(trained, settings.search, train)
            return {label: trial.lr for label, trials in tried.items() for trial in trials if trial.chosen}

        dense, *phantoms = settings.contenders
        named = {contender.label: model for contender, model in zip(phantoms, models, strict=True)}
        trials = len(settings.search.learning_rates)
        runner.expect((1 + len(phantoms)) * (trials + 1) + (1 + FINALISTS) * settings.seeds)
        rates = search_rates([dense])
        one_search, runs = spent(), list[Run]()
        while len(runs) < settings.seeds and (not runs or spent() < _DENSE_SHARE * budget):
            config = settings.config(dense, lr=rates[dense.label], seed=len(runs), target=settings.target_loss)
            runs.append(train(f"dense seed={config.seed} lr={config.lr:g}", config))
        target = _target(settings, runs)
        runs = [to_target(run, target, settings.steps, None) for run in runs]
        affordable = max(FINALISTS, int(_SEARCH_SHARE * budget / max(one_search, 1e-9)))
        phantoms = phantoms[:: -(-len(phantoms) // affordable)]  # evenly over blocks and ghosts
        named = {contender.label: named[contender.label] for contender in phantoms}
        rates |= search_rates(phantoms)
        steps, left = settings.search.steps, {contender.label: contender for contender in phantoms}
        while True:
            for label, contender in left.items():
                config = settings.config(contender, lr=rates[label], seed=settings.search.seed, steps=steps)
                first = steps == settings.search.steps
                name = f"search {label} lr={config.lr:g}" if first else f"rung {label} steps={steps} lr={config.lr:g}"
                named[label] = replace(named[label], steps=_relative_steps(train(name, config), runs[0]))
            order = sorted(left, key=lambda label: _mean_cost(named[label]))
            if spent() > _RUNGS_SHARE * budget or len(left) <= FINALISTS or 2 * steps > settings.steps:
                break
            left, steps = {label: left[label] for label in order[: max(FINALISTS, (len(order) + 1) // 2)]}, 2 * steps
        pairs: dict[str, list[tuple[float, float]]] = {label: [] for label in order[:FINALISTS]}
        for reference in runs:
            for label in in_turn(list(pairs), reference.seed):
                if spent() < budget or not any(pairs.values()):
                    seed, most = reference.seed, AT_MOST * settings.steps
                    config = settings.config(left[label], lr=rates[label], seed=seed, steps=most, target=target)
                    run = train(f"{label} seed={seed} lr={config.lr:g} loss={target:.6g}", config)
                    pairs[label].append((run.steps if run.reached else 0, reference.steps))
    for label, counts in pairs.items():
        if counts:
            reached = all(steps for steps, _ in counts)
            measured = ratio_interval(counts) if reached else None
            named[label] = replace(named[label], steps=measured, reached=reached, estimated=False)
    ordered = sorted(named.values(), key=lambda model: (not model.reached, _mean_cost(model)))
    dense_steps = tuple(run.steps for run in runs)
    return replace(result, target=target, dense_steps=dense_steps, rates=rates, models=tuple(ordered))


def _target(settings: Settings, runs: Sequence[Run]) -> float:
    """The loss that every run of the dense model has reached."""
    losses = [run.loss for run in runs if run.loss is not None]
    if len(losses) < len(runs):
        raise ValueError("the dense model reached no finite loss: give smaller --learning-rates")
    if settings.target_loss is None:
        return max(losses)
    if not all(run.reached for run in runs):
        raise ValueError(
            f"the dense model did not reach the loss {settings.target_loss:g} in {settings.steps} steps, but "
            f"{max(losses):.4g}: give more --steps, or that as --target-loss"
        )
    return settings.target_loss


def _relative_steps(run: Run, dense: Run) -> Interval | None:
    """Steps of a run over those after which the dense model first had its lowest loss; None if it diverged."""
    if run.loss is None:
        return None
    loss = min(point.loss for point in run.curve)
    steps = next((point.step for point in dense.curve if point.loss <= loss), dense.curve[-1].step)
    return Interval(run.steps / steps, None, None, 1)


def _mean_cost(model: Tuned) -> float:
    return model.cost.mean if model.cost else float("inf")
