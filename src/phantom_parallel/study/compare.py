"""Comparisons: every contender is trained to the same loss, each with the learning rate that the same search found.

variants   a few steps of every contender: the fastest of those that compute the same model trains it, if these share
           curves; pipelines get the number of micro-batches, and fsdp keeps weights or not, as makes the shortest step.
           On a network, variants that send more than others are not timed
search     every model tries the same learning rates on a seed of the search's own; formats on the wire may take the
           rate of full precision instead
target     a given loss, or the loss that every model reached in the search
runs       seed by seed, one contender after the other in rotating order, so that whatever slows the machine slows all
           of them; ratios are of runs of the same seed. Where curves are shared, a run is a training of the model by
           the fastest contender and timed steps of each contender, see `shared`
inference  forward passes of all strategies in turns, on the same ranks
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from phantom_parallel.families.registry import get_family
from phantom_parallel.study.analysis import counts, ratios_of, summarise
from phantom_parallel.study.contenders import EXACT_WIRE, Contender, ranks_of
from phantom_parallel.study.interpretation import interpreted
from phantom_parallel.study.results import Comparison, InferenceResult, Run, SharedModel, Timing, Trial
from phantom_parallel.study.runner import CellRunner, cell_runner
from phantom_parallel.study.search import Candidate, search
from phantom_parallel.study.session import RunOptions, finish, launch_ranks, notes_on_run, prepare
from phantom_parallel.study.settings import CompareSettings
from phantom_parallel.study.shared import TOLERANCES, check_same_model, fastest, models_of, shared_run
from phantom_parallel.train.config import TrainConfig
from phantom_parallel.utils.lock import FolderLock
from phantom_parallel.utils.parsing import convert


def compare(settings: CompareSettings, out: Path, *, resume: bool = False, show: bool = False) -> Comparison | None:
    """Run a comparison on local ranks, or as one rank of those that torchrun or srun started.

    Args:
        settings: What to compare.
        out: Folder for finished trainings; new or empty unless ``resume``.
        resume: Whether to continue in ``out``: trainings that are finished there are not run again.
        show: Whether to show progress on stderr.

    Returns:
        The results; None on ranks other than 0 of an external launcher.
    """
    with FolderLock(out) as lock:
        options = prepare(settings, configs_of(settings), out, resume, show, lock)
        if options.network is None or not settings.share_curves:
            return finish(launch_ranks(compare_on_rank, settings, options), options)
        # No network changes the losses, and loopback is the fastest.
        earlier = replace(options, network=None, after=cells_of_times(settings))
        losses = launch_ranks(losses_on_rank, settings, earlier)
        later = replace(options, label=f" link={settings.link}", before=losses.cells)
        return finish(launch_ranks(compare_on_rank, settings, later, losses), options)


def configs_of(settings: CompareSettings) -> list[TrainConfig]:
    """A training of every contender in every variant, to be checked before any rank starts."""
    variants = [variant for one in settings.contenders for variant in settings.variants(one)]
    return [settings.config(one, lr=1e-3, seed=0, steps=settings.steps) for one in variants]


def losses_on_rank(device: torch.device, settings: CompareSettings, options: RunOptions) -> "Losses":
    """Run one rank's part of what no network changes; every rank returns the same."""
    with cell_runner(device, settings, options, cells_of_losses(settings)) as runner:
        return find_losses(settings, runner, choose_variants(settings, runner, settings.contenders))


def compare_on_rank(
    device: torch.device, settings: CompareSettings, options: RunOptions, losses: "Losses | None" = None
) -> Comparison:
    """Run one rank's part of a comparison; every rank returns the same results.

    Args:
        device: This rank's device.
        settings: What to compare.
        options: Those of the launch.
        losses: What an earlier launch found, if there was one.
    """
    total = cells_of_times(settings) + (0 if losses else cells_of_losses(settings))
    with cell_runner(device, settings, options, total) as runner:
        if losses is None:
            variants = choose_variants(settings, runner, settings.contenders)
            losses = find_losses(settings, runner, variants, later=cells_of_times(settings))
            chosen = variants.chosen
        else:
            chosen = choose_on_network(settings, runner)
        timings = time_contenders(losses, runner, chosen) if settings.share_curves else []
        inference = _measure_inference(settings, runner)
    reused = runner.reused + (losses.reused if options.before else 0)
    return comparison(losses, chosen, timings, inference, runner.summary(), notes_on_run(options, reused))


@dataclass(frozen=True)
class Variants:
    """What a few steps of every contender have shown.

    Args:
        chosen: The contenders, each in the variant with the shortest step.
        timings: Of those that were timed.
    """

    chosen: tuple[Contender, ...]
    timings: Mapping[Contender, Timing]


@dataclass(frozen=True)
class Losses:
    """Losses of every model, which do not depend on the network.

    Args:
        settings: Those of the comparison, with the target.
        origin: Origin of the target, in words.
        shared: Models of several contenders.
        trials: The search for a learning rate, by model.
        rates: The learning rate of each model.
        runs: A training for each model and seed, named by the contender that was trained.
        models: Name of the model of each contender.
        cells: How many cells there were.
        reused: How many of them an earlier call had finished.
    """

    settings: CompareSettings
    origin: str
    shared: tuple[SharedModel, ...]
    trials: tuple[Trial, ...]
    rates: Mapping[str, float]
    runs: tuple[Run, ...]
    models: Mapping[str, str]
    cells: int = 0
    reused: int = 0

    def rate(self, name: str) -> float:
        """The learning rate of a contender."""
        return self.rates[self.models[name]]

    def run(self, name: str, seed: int) -> Run:
        """The training of a contender's model with a seed."""
        return next(one for one in self.runs if one.seed == seed and self.models[one.strategy] == self.models[name])

    @property
    def differing(self) -> dict[str, SharedModel]:
        """Contenders that were found not to compute the model that they should share."""
        return {name: one for one in self.shared for name in one.differing}


def cells_of_losses(settings: CompareSettings) -> int:
    """About how many cells the losses take."""
    models = models_of(settings.contenders, settings.share_curves)
    timed = sum(len(group) for group in models.values() if len(group) > 1)
    searched = len(models) - len(_same_rate(settings, settings.contenders))
    return timed + searched * len(settings.search.learning_rates) + len(models) * settings.seeds


def cells_of_times(settings: CompareSettings) -> int:
    """About how many cells the times of steps take."""
    if not settings.share_curves:
        return 0
    tried = (len(least_sent(settings, settings.variants(one))) for one in settings.contenders)
    on_network = sum(number for number in tried if number > 1) if settings.hosts else 0
    return len(settings.contenders) * settings.seeds + on_network


def choose_variants(settings: CompareSettings, runner: CellRunner, contenders: Sequence[Contender]) -> Variants:
    """Time a few steps of every contender that shares a model with others or has several variants. All have the same
    steps, so that their losses can be compared.
    """
    shared = {one.name for group in models_of(contenders, settings.share_curves).values() if group[1:] for one in group}
    timings: dict[Contender, Timing] = {}
    for one in contenders:
        variants = settings.variants(one)
        for variant in variants if len(variants) > 1 or one.name in shared else ():
            timings[variant] = _try(settings, runner, variant)
    return Variants(tuple(fastest(settings.variants(one), timings) for one in contenders), timings)


def _try(settings: CompareSettings, runner: CellRunner, variant: Contender, *, limit: float = math.inf) -> Timing:
    """A few timed steps of one variant, in at most ``limit`` seconds or with the fewest that are timed."""
    lr, seed = settings.search.learning_rates[0], settings.search.seed
    config = settings.config(variant, lr=lr, seed=seed, steps=settings.steps)
    return runner.time(variant, config, max(1, settings.timed_steps // 2), limit=limit)


def choose_on_network(settings: CompareSettings, runner: CellRunner) -> tuple[Contender, ...]:
    """The contenders, each in the variant with the shortest step on this network."""
    found: dict[str, Contender] = {}
    for one in settings.contenders:
        least = least_sent(settings, settings.variants(one))
        timed = least if len(least) > 1 else ()
        timings = {variant: _try(settings, runner, variant, limit=settings.timed_seconds) for variant in timed}
        found[one.name] = fastest(least, timings)
    return tuple(found[one.name] for one in settings.contenders)


def least_sent(settings: CompareSettings, variants: Sequence[Contender]) -> list[Contender]:
    """The variants that send least by the formulas, on ranks that a network connects. Variants of fsdp compute the same
    and differ in what they send; those of others differ in when they send it.
    """
    if variants[0].frees_weights is None:
        return list(variants)
    sent = [counts(settings.config(one, lr=1e-3, seed=0, steps=settings.steps))["bytes_per_step"] for one in variants]
    return [one for one, count in zip(variants, sent, strict=True) if count == min(sent)]


def find_losses(settings: CompareSettings, runner: CellRunner, variants: Variants, *, later: int = 0) -> Losses:
    """Search for learning rates and train every model to the target, each by the fastest contender that computes it.

    Args:
        settings: Those of the comparison.
        runner: Runs the cells.
        variants: What a few steps have shown.
        later: Cells of the same launch that follow.
    """
    models = models_of(variants.chosen, settings.share_curves)
    tolerance = TOLERANCES[settings.training.get("dtype", "fp32")]
    shared = [
        check_same_model(model, [variants.timings[one] for one in group], tolerance)
        for model, group in models.items()
        if len(group) > 1
    ]
    trainers = {model: group[0] for model, group in models.items()}
    named = {one.name: one for one in variants.chosen}
    trainers |= {one.model: named[one.trained_by] for one in shared}
    others = runner.done + settings.seeds * len(models)
    same = _same_rate(settings, variants.chosen)
    candidates: dict[str, Candidate] = {
        model: partial(settings.config, one, seed=settings.search.seed)
        for model, one in trainers.items()
        if model not in same
    }
    found = search(candidates, settings.search, runner, lambda trials: runner.expect(trials + others + later))
    trials = [trial for one in found.values() for trial in one]
    target, origin = choose_target(settings, trials)
    settings = replace(settings, target_loss=target)
    rates = {one.strategy: one.lr for one in trials if one.chosen}
    rates |= {model: rates[other] for model, other in same.items()}
    runs = []
    for seed in range(settings.seeds):
        for model in in_turn(list(trainers), seed):
            one = trainers[model]
            config = settings.config(one, lr=rates[model], seed=seed, steps=settings.steps)
            run = runner.train(f"{model} seed={seed} lr={config.lr:g}", config)
            runs.append(replace(run, strategy=one.name))
    of = {one.name: model for model, group in models.items() for one in group}
    counts = runner.done, runner.reused
    return Losses(settings, origin, tuple(shared), tuple(trials), rates, tuple(runs), of, *counts)


def _same_rate(settings: CompareSettings, contenders: Sequence[Contender]) -> dict[str, str]:
    """Models that take the learning rate of another: those in a short format, if formats have no search of their own,
    of a contender that is there at full precision too.
    """
    if settings.search.wires:
        return {}
    models = models_of(contenders, settings.share_curves)
    exact = {
        (one.strategy, one.ranks, one.dp): model
        for model, group in models.items()
        for one in group
        if one.wire == EXACT_WIRE
    }
    short = {model: group[0] for model, group in models.items() if group[0].wire != EXACT_WIRE}
    layouts = {model: (one.strategy, one.ranks, one.dp) for model, one in short.items()}
    return {model: exact[layout] for model, layout in layouts.items() if layout in exact}


def in_turn(names: Sequence[Any], turn: int) -> list[Any]:
    """The names in an order that begins with another one each turn."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def choose_target(settings: CompareSettings, trials: Iterable[Trial]) -> tuple[float, str]:
    """The loss that every contender is trained to, and its origin in words."""
    if settings.target_loss is not None:
        return settings.target_loss, "given in the settings"
    best: dict[str, float] = {}
    for trial in trials:
        if trial.loss is not None:
            best[trial.strategy] = min(trial.loss, best.get(trial.strategy, trial.loss))
    if not best:
        raise ValueError("no strategy reached a finite loss in the search for a learning rate: give smaller rates")
    worst = max(best, key=lambda strategy: best[strategy])
    return best[worst], (
        f"the loss that every strategy reached in {settings.search.steps} steps of the search for a learning rate; "
        f"the highest is that of {worst}"
    )


def time_contenders(losses: Losses, runner: CellRunner, contenders: Sequence[Contender]) -> list[Timing]:
    """Time steps of every contender seed by seed, in rotating order, each with its own learning rate."""
    settings, timings = losses.settings, []
    for seed in range(settings.seeds):
        for one in in_turn(contenders, seed):
            config = settings.config(one, lr=losses.rate(one.name), seed=seed, steps=settings.steps)
            timings.append(runner.time(one, config, settings.timed_steps, limit=settings.timed_seconds))
    return timings


def runs_of(losses: Losses, contenders: Sequence[Contender], timings: Sequence[Timing]) -> list[Run]:
    """A run for every contender and seed: the trainings themselves, or what follows from shared curves and timings."""
    if not losses.settings.share_curves:
        return list(losses.runs)
    named = {one.name: one for one in contenders}
    return [
        shared_run(
            losses.run(timing.strategy, timing.seed),
            timing,
            named[timing.strategy],
            differs=timing.strategy in losses.differing,
        )
        for timing in timings
    ]


def comparison(
    losses: Losses,
    contenders: Sequence[Contender],
    timings: Sequence[Timing],
    inference: Mapping[str, Sequence[InferenceResult]],
    summary: dict[str, Any],
    notes: Sequence[str],
) -> Comparison:
    """The results of a comparison from what was measured; ``notes`` are what only the run knows."""
    settings, runs = losses.settings, runs_of(losses, contenders, timings)
    configs = {one.name: settings.config(one, lr=1.0, seed=0, steps=settings.steps) for one in contenders}
    strategies = [
        summarise(
            one,
            configs[one.name],
            runs,
            inference.get(one.name, ()),
            lr=losses.rate(one.name),
            model=losses.models[one.name] if settings.share_curves else None,
            shared=losses.differing.get(one.name),
        )
        for one in contenders
    ]
    ratios = ratios_of(strategies, runs)
    found = Comparison(
        **summary | {"settings": summary["settings"] | {"target_loss": settings.target_loss}},
        target_loss=settings.target_loss or 0.0,
        target_from=losses.origin,
        trials=losses.trials,
        runs=tuple(runs),
        strategies=tuple(strategies),
        ratios=tuple(ratios),
        remarks=tuple(notes),
        shared=losses.shared,
        timings=tuple(timings),
    )
    return interpreted(found)


def _measure_inference(settings: CompareSettings, runner: CellRunner) -> dict[str, list[InferenceResult]]:
    """Inference of the models whose layers all ranks share, on the ranks of the first copy; other ranks return nothing.

    Left out are strategies whose ranks work on rows or layers of their own.
    """
    found: dict[str, list[InferenceResult]] = {}
    ranks, _ = ranks_of(settings.training)
    among = [one for one in settings.contenders if (one.ranks, one.wire) == (ranks, EXACT_WIRE) and one.cuts_layers]
    configs = {one.name: settings.config(one, lr=1.0, seed=0, steps=settings.steps) for one in among}
    first = next(iter(configs.values()), None)
    if first is None:
        return found
    context = runner.context_for(first)
    power = runner.broadcast(lambda: runner.power(first.ranks))
    if context is None or context.dp_rank:
        return found
    family = get_family(settings.family)
    for batch in settings.inference_batches:
        measured = family.measure_inference(configs, context, batch, turns=settings.inference_turns, power=power)
        for name, values in measured.items():
            found.setdefault(name, []).append(convert(values, InferenceResult, "inference"))
    return found
