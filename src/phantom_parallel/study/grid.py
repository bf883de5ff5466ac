"""The grid that comparisons and studies run: contenders x cells x links -> trainings or timed steps -> results.

variants   a few steps of every contender that shares a model with others or has several variants: the fastest of those
           that compute the same model trains it, pipelines get the number of micro-batches, and fsdp keeps weights or
           not, as makes the shortest step
search     every model tries the same learning rates on a seed of the search's own; formats on the wire may take the
           rate of full precision instead
target     a given loss, the final loss of the reference, or the loss that every model reached in the search
trainings  seed by seed, one model after the other in rotating order, so that whatever slows the machine slows all of
           them; ratios are of runs of the same seed
timings    where curves are shared: on every link, timed steps of every contender in rotating order. Time to the loss is
           the steps to the loss times the time of a step
inference  forward passes of all strategies in turns, on the same ranks, in comparisons

Losses do not depend on the network, and are trained on loopback where curves are shared. Ranks are launched once for
the losses and once for each link; every launch reads what the earlier ones left in the folder.
"""

import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

import torch

from phantom_parallel.cost.hardware import load_profile
from phantom_parallel.cost.timing import step_time
from phantom_parallel.distributed.launch import launch, launch_device_type
from phantom_parallel.distributed.launchers import is_rank_zero, launched_externally
from phantom_parallel.energy import PowerProfile, load_power_profile
from phantom_parallel.energy.power import (
    ASSUMED_CORE,
    CORE_COMMUNICATION_WATTS,
    CORE_COMPUTE_WATTS,
    CORE_IDLE_WATTS,
)
from phantom_parallel.families.registry import get_family
from phantom_parallel.study.analysis import counts
from phantom_parallel.study.contenders import EXACT_WIRE, Contender, models_of, ranks_of
from phantom_parallel.study.results import (
    FILE,
    Cell,
    CurvePoint,
    InferenceResult,
    Power,
    Results,
    Run,
    SharedModel,
    Trial,
    load,
    save,
)
from phantom_parallel.study.runner import (
    CELLS,
    NETWORKS,
    WARM_UP,
    CellRunner,
    RunOptions,
    cell_runner,
    command,
    environment,
    prepare_folder,
    resolve_networks,
)
from phantom_parallel.study.search import search
from phantom_parallel.study.settings import LOOPBACK, Settings
from phantom_parallel.train.run import check_memory
from phantom_parallel.utils.files import FolderLock, write_json
from phantom_parallel.utils.parsing import convert

T = TypeVar("T")
IDLE_TIMEOUT = timedelta(hours=12)  # of the collectives in which ranks wait while a cell runs on the others
# Largest relative difference of losses that is rounding, by the precision of products. Orders of summation differ, and
# the optimizer divides gradients by their own size, so that rounding of the smallest ones grows with the steps.
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}


def run_grid(settings: Settings, out: Path, *, resume: bool = False, show: bool = False) -> Results | None:
    """Run a comparison or a study on local ranks, or as one rank of those that torchrun or srun started.

    Args:
        settings: What to run.
        out: Folder for finished runs and the results; new or empty unless ``resume``.
        resume: Whether to continue in ``out``: what is finished there is not run again.
        show: Whether to show progress on stderr.

    Returns:
        The results; None on ranks other than 0 of an external launcher.
    """
    clock, local = time.monotonic(), not launched_externally()
    _check(settings, local)
    with FolderLock(out) as lock:
        networks, no_hosts = resolve_networks(settings, settings.configs()[0].dtype, out)
        options = RunOptions(out, resume, show, local, command(), networks=networks, no_hosts=no_hosts)
        launches = _launches(settings, options)
        if local:
            prepare_folder(out, settings.to_dict(), resume, lock)
            options = replace(options, reused=len(list((out / CELLS).glob("*.json"))))
            if networks:
                write_json(out / NETWORKS, {link: network.to_dict() for link, network in networks.items()})
        elif len(launches) > 1:
            raise ValueError(f"{settings.name} launches its ranks on several networks: start it as one process")
        if no_hosts and show and is_rank_zero():
            print(f"Ranks exchange over loopback: hosts cannot be emulated here: {no_hosts}", file=sys.stderr)
        for link in launches:
            network = None if link is None else networks.get(link)
            here = replace(options, link=link)
            launch(settings.world_size, _work, settings, here, timeout=IDLE_TIMEOUT, network=network)
    if not local and not is_rank_zero():
        return None
    results = replace(load(out / FILE), wall_seconds=time.monotonic() - clock)
    save(results, out / FILE)
    return results


def _check(settings: Settings, local: bool) -> None:
    """Raise ValueError or OSError for mistakes in the data, the memory or the watts, before any rank starts."""
    load_power_profile(settings.profile)
    load_profile(settings.hardware)
    for config in settings.configs():
        config.task().check(config)
        if local and launch_device_type(config.ranks * config.dp) == "cpu":
            check_memory(config)


def _launches(settings: Settings, options: RunOptions) -> list[str | None]:
    """The links of the launches, in order; None is the one for the losses, where links are measured after it."""
    links: list[str | None] = [LOOPBACK] if options.no_hosts else list(settings.all_links)
    apart = settings.measure == "loss" and settings.share_curves and links != [LOOPBACK]
    return [None, *links] if apart else links


def _work(device: torch.device, settings: Settings, options: RunOptions) -> None:
    """One rank's part of a launch; rank 0 writes the results of the last one."""
    results = grid_on_rank(device, settings, options)
    if results is not None and is_rank_zero():
        save(results, options.out / FILE)


def grid_on_rank(device: torch.device, settings: Settings, options: RunOptions) -> Results | None:
    """Run one rank's part of a launch. Every rank returns the same results; None before the last launch."""
    links = [link for link in _launches(settings, options) if link is not None]
    with cell_runner(device, settings, options) as runner:
        runner.expect(_expected(settings, len(links)))
        losses = find_losses(settings, runner, len(links)) if settings.measure == "loss" else None
        if options.link is None:
            return None
        cells: list[Cell] = []
        for link in links[: links.index(options.link) + 1]:
            if losses is not None and not settings.share_curves:
                trained = {contender: losses.runs[losses.models[contender.label]] for contender in losses.chosen}
                cells += [_cell(settings, contender, runs, link) for contender, runs in trained.items()]
            else:
                cells += _time_link(settings, runner, losses, link, on_network=link in options.networks)
        if options.link != links[-1]:
            return None
        cells += [_modelled_cell(settings, contender) for contender in settings.modelled_contenders]
        inference = _measure_inference(settings, runner)
    cells = [replace(cell, inference=tuple(inference.get(cell.strategy, ()))) for cell in cells]
    target = None if losses is None else losses.target
    return Results(
        name=settings.name,
        question=settings.question,
        command=options.command,
        started=options.started,
        wall_seconds=0.0,  # set by the caller
        settings=settings.to_dict(),
        environment=environment(device),
        power=_power(load_power_profile(settings.profile)),
        cells=tuple(cells),
        target_loss=target,
        target_from=None if losses is None or target is None else losses.target_from,
        trials=() if losses is None else losses.trials,
        shared=() if losses is None else losses.shared,
        networks={link: options.networks[link] for link in links if link in options.networks} or None,
        no_hosts=options.no_hosts,
        reused=options.reused,
    )


def _power(profile: PowerProfile) -> Power:
    """The watts of a profile for results: those of a core if they are assumed, which do not depend on how many ranks
    share it, else those of a device.
    """
    if profile.name != ASSUMED_CORE:
        watts = profile.compute_watts, profile.communication_watts, profile.idle_watts
        return Power(profile.name, *watts, source=profile.source, per="device")
    watts = CORE_COMPUTE_WATTS, CORE_COMMUNICATION_WATTS, CORE_IDLE_WATTS
    return Power(ASSUMED_CORE, *watts, source="assumed, not measured, of a CPU core; ranks share the cores", per="core")


def _expected(settings: Settings, links: int) -> int:
    """About how many cells there are, for the display."""
    contenders, models = settings.contenders, models_of(settings.contenders, settings.share_curves)
    timed = len(contenders) * settings.seeds * links
    if settings.measure == "speed":
        return timed
    trained = len(models) * (len(settings.search.learning_rates) + settings.seeds)
    shared = sum(len(group) for group in models.values() if len(group) > 1)
    return trained + shared + (timed if settings.share_curves else 0)


# Losses


@dataclass(frozen=True)
class Losses:
    """Losses of every model, which do not depend on the network."""

    chosen: tuple[Contender, ...]  # each in the variant with the shortest step
    models: Mapping[str, str]  # name of the model of each contender, by label
    runs: Mapping[str, Sequence[Run]]  # of each model, one for each seed
    trained_by: Mapping[str, str]  # label of the contender that was trained, by model
    shared: tuple[SharedModel, ...]  # models of several contenders
    trials: tuple[Trial, ...]
    target: float | None  # the loss that all are trained to, if there is one
    target_from: Literal["settings", "search", "reference"]


def find_losses(settings: Settings, runner: CellRunner, links: int = 1) -> Losses:
    """Search for learning rates and train every model, each by the fastest contender that computes it."""
    chosen, timings = choose_variants(settings, runner)
    models = models_of(chosen, settings.share_curves)
    tolerance = TOLERANCES[settings.training.get("dtype", "fp32")]
    shared = [
        check_same_model(model, {contender.label: timings[contender] for contender in group}, tolerance)
        for model, group in models.items()
        if len(group) > 1
    ]
    labelled = {contender.label: contender for contender in chosen}
    trainers = {model: group[0] for model, group in models.items()}
    trainers |= {check.model: labelled[check.trained_by] for check in shared}
    later = len(chosen) * settings.seeds * links if settings.share_curves else 0
    references = {model: one for model, one in trainers.items() if settings.is_reference(one)}
    others = {model: one for model, one in trainers.items() if model not in references}
    trials: list[Trial] = []
    runs: dict[str, list[Run]] = {}
    given = settings.equal_loss and settings.reference is None
    target: float | None = settings.target_loss if given else None
    target_from: Literal["settings", "search", "reference"] = "settings"
    for group in filter(None, (references, others)):
        tried = _search(settings, runner, group, target, later + settings.seeds * len(trainers))
        trials += tried
        if settings.equal_loss and target is None and settings.reference is None:
            target, target_from = _reached_by_all(tried), "search"
        runs |= _train(settings, runner, group, trials, target)
        if group is references:
            final = [run.loss for mine in runs.values() for run in mine if run.loss is not None]
            if not final:
                raise ValueError(f"the cells of the reference {settings.reference} reached no finite loss")
            target, target_from = max(final), "reference"  # which every run of the reference has reached
    if target_from == "reference":
        runs = _to_the_reference(settings, runs, list(references), target)
    return Losses(
        chosen,
        {contender.label: model for model, group in models.items() for contender in group},
        runs,
        {model: contender.label for model, contender in trainers.items()},
        tuple(shared),
        tuple(trials),
        target,
        target_from,
    )


def choose_variants(settings: Settings, runner: CellRunner) -> tuple[tuple[Contender, ...], dict[Contender, Run]]:
    """Every contender in the variant with the shortest step, and the timings of a few steps: of all that share a model
    with others or have several variants. All have the same steps, so that their losses can be compared.
    """
    groups = models_of(settings.contenders, settings.share_curves).values()
    shared = {contender.label for group in groups if len(group) > 1 for contender in group}
    timings: dict[Contender, Run] = {}
    for contender in settings.contenders:
        variants = settings.variants(contender)
        for variant in variants if len(variants) > 1 or contender.label in shared else ():
            timings[variant] = _try(settings, runner, variant)
    chosen = tuple(fastest(settings.variants(contender), timings) for contender in settings.contenders)
    return chosen, timings


def _try(settings: Settings, runner: CellRunner, variant: Contender, link: str = "", limit: float = math.inf) -> Run:
    """A few timed steps of one variant, in at most ``limit`` seconds or with the fewest that are timed."""
    seed = settings.search.seed
    config = settings.config(variant, lr=settings.search.learning_rates[0], seed=seed)
    return runner.time(timing_name(variant, seed, link), config, max(1, settings.timed_steps // 2), limit=limit)


def timing_name(contender: Contender, seed: int, link: str) -> str:
    """Name of the cell with a contender's timed steps."""
    parts = ("time", contender.label, contender.variant, f"seed={seed}", f"link={link}" if link else "")
    return " ".join(filter(None, parts))


def fastest(variants: Sequence[Contender], timings: Mapping[Contender, Run]) -> Contender:
    """The one with the shortest step; those that diverged or were not timed come last."""
    return min(variants, key=lambda one: (one in timings and timings[one].step_seconds) or math.inf)


def check_same_model(model: str, timings: Mapping[str, Run], tolerance: float) -> SharedModel:
    """Compare the losses of contenders that should compute the same model with the medians over them.

    Args:
        model: Name of the model.
        timings: By contender, the same steps with the same seed and learning rate.
        tolerance: The largest relative difference that is rounding.
    """
    middle = [median(losses) for losses in zip(*(run.losses for run in timings.values() if run.losses), strict=True)]
    differences = {name: _difference(run.losses, middle) for name, run in timings.items()}
    steps = WARM_UP + max(run.steps for run in timings.values())
    check = SharedModel(model, next(iter(timings)), steps, tolerance, differences)
    equal = [name for name in timings if name not in check.differing] or list(timings)
    return replace(check, trained_by=min(equal, key=lambda name: timings[name].step_seconds or math.inf))


def _difference(losses: Sequence[float], others: Sequence[float]) -> float | None:
    if not losses or len(losses) != len(others):
        return None
    return max(abs(loss - other) / max(abs(other), 1e-30) for loss, other in zip(losses, others, strict=True))


def _search(
    settings: Settings, runner: CellRunner, models: Mapping[str, Contender], target: float | None, later: int
) -> list[Trial]:
    """The trials of the search for a learning rate of every model but those that take another's."""
    seed, same, before = settings.search.seed, same_rate(settings), runner.done
    candidates = {
        model: partial(settings.config, contender, seed=seed, target=target)
        for model, contender in models.items()
        if model not in same
    }
    tried = search(candidates, settings.search, runner.train, lambda number: runner.expect(before + number + later))
    return [trial for trials in tried.values() for trial in trials]


def same_rate(settings: Settings) -> dict[str, str]:
    """Models that take the learning rate of another: those in a short format, if formats have no search of their own,
    of a strategy that is there at full precision too.
    """
    groups = models_of(settings.contenders, settings.share_curves)
    exact = {_layout(one): model for model, group in groups.items() for one in group if one.wire == EXACT_WIRE}
    short = {model: _layout(group[0]) for model, group in groups.items() if group[0].wire != EXACT_WIRE}
    return {} if settings.search.wires else {model: exact[at] for model, at in short.items() if at in exact}


def _layout(contender: Contender) -> tuple[Any, ...]:
    return contender.strategy, contender.ranks, contender.dp, contender.cell


def _reached_by_all(trials: Iterable[Trial]) -> float:
    """The loss that every model reached in the search."""
    best: dict[str, float] = {}
    for trial in trials:
        if trial.loss is not None:
            best[trial.model] = min(trial.loss, best.get(trial.model, trial.loss))
    if not best:
        raise ValueError("no strategy reached a finite loss in the search for a learning rate: give smaller rates")
    return max(best.values())


def _train(
    settings: Settings,
    runner: CellRunner,
    models: Mapping[str, Contender],
    trials: Iterable[Trial],
    target: float | None,
) -> dict[str, list[Run]]:
    """Train every model once for each seed, in rotating order, with the learning rate of the search."""
    rates = {trial.model: trial.lr for trial in trials if trial.chosen}
    rates |= {model: rates[other] for model, other in same_rate(settings).items()}
    to_reference = settings.reference is not None and target is not None
    steps = (settings.at_most or settings.steps) if to_reference else settings.steps
    stop = None if to_reference and not settings.stop_at_target else target
    runs: dict[str, list[Run]] = {model: [] for model in models}
    for seed in range(settings.seeds):
        for model in in_turn(list(models), seed):
            config = settings.config(models[model], lr=rates[model], seed=seed, steps=steps, target=stop)
            runs[model].append(runner.train(f"{model} seed={seed} lr={config.lr:g}", config))
    return runs


def in_turn(names: Sequence[T], turn: int) -> list[T]:
    """The names in an order that begins with another one each turn."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def _to_the_reference(
    settings: Settings, runs: Mapping[str, Sequence[Run]], references: Sequence[str], target: float | None
) -> dict[str, list[Run]]:
    """Runs with their figures at the loss of the reference, and with the losses at its steps and within its energy."""
    assert target is not None
    budgets = {
        seed: median(spent)
        for seed in range(settings.seeds)
        if (spent := [runs[model][seed].joules or 0.0 for model in references if runs[model][seed].joules])
    }
    return {
        model: [to_target(run, target, settings.steps, budgets.get(run.seed)) for run in mine]
        for model, mine in runs.items()
    }


def to_target(run: Run, target: float, steps: int, joules: float | None) -> Run:
    """A training with the figures at its first evaluation at or below the target, with the loss after ``steps``, and
    with that of its last evaluation within ``joules``, which is not the lowest, as that of the reference is not either.
    """
    end = next((point for point in run.curve if point.loss <= target), None)
    spent = [point.loss for point in run.curve if joules is not None and point.joules and point.joules <= joules]
    run = replace(
        run,
        loss_at_equal_steps=next((point.loss for point in run.curve if point.step == steps), None),
        loss_at_equal_energy=spent[-1] if spent else None,
    )
    if end is None:
        return run if run.status == "diverged" else replace(run, status="steps")
    return replace(run, status="target", steps=end.step, seconds=end.seconds, joules=end.joules)


# Cells


def _time_link(
    settings: Settings, runner: CellRunner, losses: Losses | None, link: str, *, on_network: bool
) -> list[Cell]:
    """Time steps of every contender on a link, seed by seed in rotating order, each with its own learning rate."""
    chosen = losses.chosen if losses is not None and not on_network else _choose_on_link(settings, runner, link)
    timings: dict[Contender, list[Run]] = {contender: [] for contender in chosen}
    for seed in range(settings.seeds):
        for contender in in_turn(chosen, seed):
            lr = settings.search.learning_rates[0]
            if losses is not None:
                lr = losses.runs[losses.models[contender.label]][seed].lr
            config = settings.config(contender, lr=lr, seed=seed)
            name = timing_name(contender, seed, link)
            run = runner.time(name, config, settings.timed_steps, limit=settings.timed_seconds)
            timings[contender].append(run)
    if losses is None:
        return [_cell(settings, contender, runs, link) for contender, runs in timings.items()]
    return [_shared_cell(settings, contender, runs, losses, link) for contender, runs in timings.items()]


def _choose_on_link(settings: Settings, runner: CellRunner, link: str) -> tuple[Contender, ...]:
    """The contenders, each in the variant with the shortest step on this network."""
    chosen = []
    for contender in settings.contenders:
        variants = least_sent(settings, settings.variants(contender))
        timed = variants if len(variants) > 1 else ()
        timings = {variant: _try(settings, runner, variant, link, settings.timed_seconds) for variant in timed}
        chosen.append(fastest(variants, timings))
    return tuple(chosen)


def least_sent(settings: Settings, variants: Sequence[Contender]) -> list[Contender]:
    """The variants that send least by the formulas, on ranks that a network connects. Variants of fsdp compute the same
    and differ in what they send; those of others differ in when they send it.
    """
    if variants[0].frees_weights is None:
        return list(variants)
    sent = [counts(settings.config(variant))["bytes_per_step"] for variant in variants]
    return [variant for variant, count in zip(variants, sent, strict=True) if count == min(sent)]


def _cell(settings: Settings, contender: Contender, runs: Iterable[Run], link: str, model: str | None = None) -> Cell:
    config = settings.config(contender)
    counted: dict[str, Any] = counts(config)
    return Cell(
        strategy=contender.name,
        ranks=contender.ranks,
        dp=contender.dp,
        batch=config.batch,
        **counted,
        runs=tuple(runs),
        settings=dict(contender.cell),
        link=link,
        blocks=config.blocks,
        ghosts=config.ghosts,
        wire=contender.wire,
        variant=contender.variant,
        model=model,
    )


def _shared_cell(settings: Settings, contender: Contender, timings: Sequence[Run], losses: Losses, link: str) -> Cell:
    """A contender whose runs are made of shared losses and of its own time of a step."""
    model = losses.models[contender.label]
    trained_by = None if losses.trained_by[model] == contender.label else losses.trained_by[model]
    differs = any(contender.label in shared.differing for shared in losses.shared)
    runs = [
        shared_run(run, timing, trained_by=trained_by, differs=differs)
        for run, timing in zip(losses.runs[model], timings, strict=True)
    ]
    return _cell(settings, contender, runs, link, model)


def shared_run(run: Run, timing: Run, *, trained_by: str | None = None, differs: bool = False) -> Run:
    """The training of a contender, made of the steps and losses of ``run`` and of its own time of a step.

    Args:
        run: A training of the same model with the same seed.
        timing: Timed steps of the contender.
        trained_by: Who was trained, if it was another contender.
        differs: Whether the contender was seen to compute another model, so that the losses are not its own.
    """
    if not timing.steps:
        return replace(timing, lr=run.lr, trained_by=trained_by, timed_steps=0)

    def in_steps(total: float | None, steps: int = run.steps) -> float | None:
        return None if total is None else steps * total / timing.steps

    each = timing.seconds / timing.steps
    curve = tuple(CurvePoint(at.step, at.loss, at.step * each, in_steps(timing.joules, at.step)) for at in run.curve)
    return replace(
        run,
        trained_by=trained_by,
        timed_steps=timing.steps,
        measured_by=timing.measured_by,
        status="differs" if differs else run.status,
        loss=None if differs else run.loss,
        seconds=run.steps * each,
        compute_seconds=in_steps(timing.compute_seconds),
        blocked_seconds=in_steps(timing.blocked_seconds),
        joules=in_steps(timing.joules),
        measured_joules=in_steps(timing.measured_joules),
        curve=() if differs else curve,
    )


def _modelled_cell(settings: Settings, contender: Contender) -> Cell:
    """A cell whose step is computed by the cost formulas for a hardware profile."""
    config = settings.config(contender)
    profile = load_profile(settings.hardware)
    step = step_time(get_family(config.family).shape.of_training(config), profile)
    ranks = config.ranks * config.dp
    run = Run(
        seed=0,
        lr=config.lr,
        status="timed",
        steps=1,
        loss=None,
        seconds=step.total,
        compute_seconds=ranks * (step.total - step.exposed),
        blocked_seconds=ranks * step.exposed,
        joules=step.energy.joules if step.energy else None,
        measured_joules=None,
        measured_by="unavailable",
    )
    return replace(_cell(settings, contender, [run], "modelled"), hardware=profile.name)


def _measure_inference(settings: Settings, runner: CellRunner) -> dict[str, list[InferenceResult]]:
    """Inference of the models whose layers all ranks share, on the ranks of the first copy; other ranks return nothing.

    Left out are strategies whose ranks work on rows or layers of their own, and studies of several cells.
    """
    measured: dict[str, list[InferenceResult]] = {}
    if settings.cells != ({},) or settings.measure != "loss":
        return measured
    ranks, _ = ranks_of(settings.training)
    among = [
        contender
        for contender in settings.contenders
        if (contender.ranks, contender.wire) == (ranks, EXACT_WIRE)
        and not (contender.rules.shards_rows or contender.rules.splits_depth)
    ]
    configs = {contender.name: settings.config(contender) for contender in among}
    first = next(iter(configs.values()), None)
    if first is None:
        return measured
    context, power = runner.context_for(first), runner.power(first.ranks)
    if context is None or context.dp_rank:
        return measured
    family = get_family(settings.family)
    for batch in settings.inference_batches:
        values = family.measure_inference(configs, context, batch, turns=settings.inference_turns, power=power)
        for name, fields in values.items():
            measured.setdefault(name, []).append(convert(fields, InferenceResult, "inference"))
    return measured
