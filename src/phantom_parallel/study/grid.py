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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

import torch

from phantom_parallel.cost.hardware import load_profile
from phantom_parallel.cost.timing import least_joules
from phantom_parallel.distributed.launch import launch, launch_device_type
from phantom_parallel.distributed.launchers import is_rank_zero, launched_externally
from phantom_parallel.energy import load_power_profile
from phantom_parallel.energy.power import ASSUMED_CORE
from phantom_parallel.families.registry import get_family
from phantom_parallel.study.contenders import DENSE, EXACT_WIRE, Contender, models_of
from phantom_parallel.study.results import FILE, Cell, InferenceResult, Results, Run, SharedModel, Trial, save
from phantom_parallel.study.runner import (
    CELLS,
    NETWORKS,
    CellRunner,
    RunOptions,
    cell_runner,
    environment,
    prepare_folder,
    resolve_networks,
    shape_of,
)
from phantom_parallel.study.settings import LOOPBACK, Decoding, SearchSettings, Settings
from phantom_parallel.train.config import TrainConfig
from phantom_parallel.train.run import check_memory
from phantom_parallel.utils.files import FolderLock, write_json
from phantom_parallel.utils.parsing import convert

T = TypeVar("T")
DRAWN = {"phantom": "phantom", DENSE: "dense"}  # functions whose held-out fields are kept, and the stem of their file
# Largest relative difference of losses that is rounding, by the precision of products. Orders of summation differ, and
# the optimizer divides gradients by their own size, so that rounding of the smallest ones grows with the steps.
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}


def run_grid(settings: Settings, out: Path, *, resume: bool = False, show: bool = False) -> Results | None:
    """Run a comparison or a study on local ranks, or as one rank of those that torchrun or srun started.

    The folder ``out`` must be new or empty; with ``resume``, what is finished there is not run again. ``show`` is
    whether to show progress on stderr. Returns None on ranks other than 0 of an external launcher.
    """
    clock, started, local = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds"), not launched_externally()
    load_power_profile(settings.profile)
    for config in settings.configs():  # mistakes in the data, the memory or the watts, before any rank starts
        config.task().check(config)
        if local and launch_device_type(config.world) == "cpu":
            check_memory(config)
    with FolderLock(out) as lock:
        networks, no_hosts = resolve_networks(settings, settings.configs()[0].dtype, out)
        options = RunOptions(out, resume, show, local, networks, no_hosts=no_hosts)
        launches = _launches(settings, options)
        reused = len(list((out / CELLS).glob("*.json")))
        if local:
            prepare_folder(out, settings.to_dict(), resume, lock)
            if networks:
                write_json(out / NETWORKS, {link: asdict(network) for link, network in networks.items()})
        elif len(launches) > 1:
            raise ValueError(f"{settings.name} launches its ranks on several networks: start it as one process")
        if no_hosts and show and is_rank_zero():
            print(f"Ranks exchange over loopback: hosts cannot be emulated here: {no_hosts}", file=sys.stderr)
        for link in launches:
            where: Any = {"timeout": timedelta(seconds=settings.timeout), "network": networks.get(link or "")}
            results = launch(settings.world_size, grid_on_rank, settings, replace(options, link=link), **where)
    if results is None or not is_rank_zero():
        return None
    name = Path(sys.argv[0]).name
    command = " ".join(["phantom" if name == "main.py" else name, *sys.argv[1:]])
    seconds = time.monotonic() - clock
    results = replace(results, command=command, started=started, wall_seconds=seconds, reused=reused)
    save(results, out / FILE)
    return results


def _launches(settings: Settings, options: RunOptions) -> list[str | None]:
    """The links of the launches, in order; None is the one for the losses, where links are measured after it."""
    links: list[str | None] = [LOOPBACK] if options.no_hosts else list(settings.all_links)
    apart = settings.measure == "loss" and settings.share_curves and links != [LOOPBACK]
    return [None, *links] if apart else links


def grid_on_rank(device: torch.device, settings: Settings, options: RunOptions) -> Results | None:
    """Run one rank's part of a launch. Every rank returns the same results; None before the last launch."""
    links = [link for link in _launches(settings, options) if link is not None]
    with cell_runner(device, settings, options) as runner:
        runner.total = _expected(settings, len(links))
        sizes, tried = find_smaller(settings, runner.train)
        settings = replace(settings, smaller=sizes)
        losses = find_losses(settings, runner, tried) if settings.measure == "loss" else None
        if options.link is None:
            return None
        cells: list[Cell] = []
        for link in links[: links.index(options.link) + 1]:
            if losses is not None and not settings.share_curves:
                models = losses.models.items()
                cells += [_cell(settings, contender, losses.runs[model], link) for contender, model in models]
            else:
                cells += _time_link(settings, runner, losses, link, on_network=link in options.networks)
        if options.link != links[-1]:
            return None
        inference = _measure_inference(settings, runner)
    return Results(
        name=settings.name,
        question=settings.question,
        settings=settings.to_dict(),
        environment=environment(device),
        power=runner.power(settings.world_size),
        cells=tuple(replace(cell, inference=tuple(inference.get(cell.strategy, ()))) for cell in cells),
        networks={link: options.networks[link] for link in links if link in options.networks} or None,
        no_hosts=options.no_hosts,
        target_loss=losses.target if losses else None,
        target_from=losses.target_from if losses and losses.target is not None else None,
        trials=losses.trials if losses else (),
        shared=losses.shared if losses else (),
    )


def _expected(settings: Settings, links: int) -> int:
    """About how many cells there are, for the display."""
    contenders, models = settings.contenders, models_of(settings.contenders, settings.share_curves)
    timed = len(contenders) * settings.seeds * links
    if settings.measure != "loss":
        return timed
    trained = len(models) * (len(settings.search.learning_rates) + settings.seeds)
    shared = sum(len(settings.variants(each)) for group in models.values() if len(group) > 1 for each in group)
    return trained + shared + (timed if settings.share_curves else 0)


def counts(config: TrainConfig, decoding: Decoding | None = None) -> dict[str, int]:
    """Counts by the cost formulas: FLOPs and bytes of a step over all ranks, memory of the rank that needs most. To
    decode, a step is a token for each sequence.
    """
    shape = shape_of(config, decoding)
    return {
        "parameters": shape.model_parameters,
        "flops_per_step": shape.over_all_ranks(lambda shape: 2 * shape.multiply_adds()),
        "bytes_per_step": shape.over_all_ranks(lambda shape: shape.moved_bytes()),
        "memory_bytes": max(stage.memory.total for stage, _ in shape.stages()),
    }


@dataclass(frozen=True)
class Losses:
    """Losses of every model, which do not depend on the network."""

    models: Mapping[Contender, str]  # of each contender, in the variant with the shortest step
    runs: Mapping[str, Sequence[Run]]  # of each model, one for each seed
    trained_by: Mapping[str, str]  # label of the contender that was trained, by model
    shared: tuple[SharedModel, ...]  # models of several contenders
    trials: tuple[Trial, ...]
    target: float | None  # the loss that all are trained to, if there is one
    target_from: Literal["settings", "search", "reference"]


def find_losses(settings: Settings, runner: CellRunner, tried: Sequence[Trial] = ()) -> Losses:
    """Search for learning rates and train every model, each by the fastest contender that computes it. ``tried`` are
    the trials of `find_smaller`, which has searched for its model's rate.
    """
    chosen, timings = choose_variants(settings, runner)
    models = models_of(chosen, settings.share_curves)
    tolerance = TOLERANCES[settings.training.get("dtype", "fp32")]
    shared = [
        check_same_model(model, {contender.label: timings[contender] for contender in group}, tolerance)
        for model, group in models.items()
        if len(group) > 1
    ]
    labels = {contender.label: contender for contender in chosen}
    trainers = {model: group[0] for model, group in models.items()}
    trainers |= {check.model: labels[check.trained_by] for check in shared}
    references = {model: contender for model, contender in trainers.items() if settings.is_reference(contender)}
    others = {model: contender for model, contender in trainers.items() if model not in references}
    target = settings.target_loss if settings.equal_loss else None
    target_from: Literal["settings", "search", "reference"] = "settings"
    trials: list[Trial] = []
    runs: dict[str, list[Run]] = {}
    steps, stops = settings.steps, True
    if references:
        trials = _search(settings, runner, references, None)
        runs = _train(settings, runner, references, trials, steps, None)
        final = [run.loss for model in references for run in runs[model] if run.loss is not None]
        if not final:
            raise ValueError(f"the cells of the reference {settings.reference} reached no finite loss")
        target, target_from = max(final), "reference"  # which every run of the reference has reached
        steps, stops = settings.at_most or steps, settings.stop_at_target
    smaller = next((model for model, contender in trainers.items() if contender.base.smaller), "")
    trials += [replace(trial, model=smaller) for trial in tried]
    trials += _search(settings, runner, {m: c for m, c in others.items() if m != smaller or not tried}, target)
    if settings.equal_loss and target is None:
        best = [
            min((trial.loss for trial in trials if trial.model == model and trial.loss is not None), default=None)
            for model in dict.fromkeys(trial.model for trial in trials)
        ]
        if not (reached := [loss for loss in best if loss is not None]):
            raise ValueError("no strategy reached a finite loss in the search for a learning rate: give smaller rates")
        target, target_from = max(reached), "search"
    runs |= _train(settings, runner, others, trials, steps, target if stops else None)
    if references:  # figures at its loss, and losses at its steps and within its energy
        assert target is not None
        spent = [[run.joules for model in references for run in [runs[model][seed]]] for seed in range(settings.seeds)]
        budgets = [median(known) if (known := [joules for joules in each if joules]) else None for each in spent]
        runs = {
            model: [to_target(run, target, settings.steps, budgets[run.seed]) for run in trained]
            for model, trained in runs.items()
        }
    named = {contender: model for model, group in models.items() for contender in group}
    trained_by = {model: contender.label for model, contender in trainers.items()}
    ordered = {contender: named[contender] for contender in chosen}
    return Losses(ordered, runs, trained_by, tuple(shared), tuple(trials), target, target_from)


def find_smaller(settings: Settings, train: Callable[[str, TrainConfig], Run]) -> tuple[dict[str, Any], list[Trial]]:
    """The settings of the smallest dense model that reaches the loss, by bisection, and the trials of its learning
    rates; none if only the full size does.
    """
    contender = next((contender for contender in settings.contenders if contender.base.smaller), None)
    if contender is None or settings.measure != "loss":
        return {}, []
    sizes = get_family(settings.family).smaller_models(settings.config(contender))
    trials = replace(settings.search, steps=settings.steps)
    low, high, kept = 0, len(sizes), list[Trial]()
    while low < high:
        middle = (low + high) // 2
        tried = contender.tuned_to(**sizes[middle])
        config = partial(settings.config, tried, seed=settings.search.seed, target=settings.target_loss)
        name = f"{contender.label} {tried.variant}"
        outcomes = search({name: config}, trials, train)[name]
        reached = any(trial.chosen and trial.status == "target" for trial in outcomes)
        low, high, kept = (low, middle, outcomes) if reached else (middle + 1, high, kept)
    return (sizes[high] if high < len(sizes) else {}), kept


def choose_variants(
    settings: Settings, runner: CellRunner, link: str = ""
) -> tuple[tuple[Contender, ...], dict[Contender, Run]]:
    """Every contender in the variant with the shortest step, and the timings of a few steps of those with several, and
    where losses are trained, on no ``link``, of all that share a model with others.
    """
    groups = models_of(settings.contenders, settings.share_curves).values()
    shared = {contender.label for group in groups if len(group) > 1 and not link for contender in group}
    seed, steps = settings.search.seed, max(1, settings.timed_steps // 2)
    timings: dict[Contender, Run] = {}
    chosen = []
    for contender in settings.contenders:
        variants = settings.variants(contender)
        if link and contender.rules.shards_rows:  # variants compute the same, and differ in what they send
            variants = (min(variants, key=lambda variant: counts(settings.config(variant))["bytes_per_step"]),)
        for variant in variants if len(variants) > 1 or contender.label in shared else ():
            config = settings.config(variant, lr=settings.search.learning_rates[0], seed=seed)
            limit = settings.timed_seconds if link else math.inf
            timings[variant] = runner.time(timing_name(variant, seed, link), config, steps, limit=limit)
        timed = {variant: timings[variant].step_seconds for variant in variants if variant in timings}
        chosen.append(min(variants, key=lambda variant: timed.get(variant) or math.inf))
    return tuple(chosen), timings


def timing_name(contender: Contender, seed: int, link: str) -> str:
    """Name of the cell with a contender's timed steps."""
    parts = ("time", contender.label, contender.variant, f"seed={seed}", f"link={link}" if link else "")
    return " ".join(filter(None, parts))


def check_same_model(model: str, timings: Mapping[str, Run], tolerance: float) -> SharedModel:
    """Compare the losses of contenders that should compute the same model with the medians over them."""
    middle = [median(losses) for losses in zip(*(run.losses for run in timings.values() if run.losses), strict=True)]
    differences: dict[str, float | None] = dict.fromkeys(timings)
    for name, run in timings.items():
        if run.losses and len(run.losses) == len(middle):
            pairs = zip(run.losses, middle, strict=True)
            differences[name] = max(abs(loss - other) / max(abs(other), 1e-30) for loss, other in pairs)
    check = SharedModel(model, next(iter(timings)), tolerance, differences)
    equal = [name for name in timings if name not in check.differing] or list(timings)
    return replace(check, trained_by=min(equal, key=lambda name: timings[name].step_seconds or math.inf))


def _search(
    settings: Settings, runner: CellRunner, models: Mapping[str, Contender], target: float | None
) -> list[Trial]:
    """The trials of the search for a learning rate of every model but those that take another's."""
    same = same_rate(settings)
    candidates = {
        model: partial(settings.config, contender, seed=settings.search.seed, target=target)
        for model, contender in models.items()
        if model not in same
    }
    tried = search(candidates, settings.search, runner.train)
    return [trial for trials in tried.values() for trial in trials]


def search(
    candidates: Mapping[str, Callable[..., TrainConfig]],
    settings: SearchSettings,
    train: Callable[[str, TrainConfig], Run],
) -> dict[str, list[Trial]]:
    """Try learning rates for every candidate, in turns: in ascending order, and beyond an end of the list while the
    best is at that end. A trial is stopped as soon as it cannot be the best. ``candidates`` are trainings by the name
    of a model, called with ``lr`` and ``steps``.
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
    """The trials in ascending order of the rate, the best marked: fewest steps to the target, else the lowest loss."""

    def key(trial: Trial) -> tuple[int, float, float]:
        loss = math.inf if trial.loss is None else trial.loss
        return (0, trial.steps, loss) if trial.status == "target" else (1, loss, loss)

    ordered = sorted(trials, key=lambda trial: trial.lr)
    best = min(ordered, key=key)
    return [replace(trial, chosen=trial is best) for trial in ordered]


def next_rate(trials: Sequence[Trial], settings: SearchSettings) -> float | None:
    """The next learning rate beyond the end at which the best one is, if there is one."""
    rates = settings.learning_rates
    if len(rates) < 2 or len(trials) >= len(rates) + settings.extend:
        return None
    ordered, factor = mark_best(trials), rates[1] / rates[0]
    if ordered[-1].chosen:
        return float(f"{ordered[-1].lr * factor:.6g}")
    return float(f"{ordered[0].lr / factor:.6g}") if ordered[0].chosen else None


def same_rate(settings: Settings) -> dict[str, str]:
    """Models in a short format that take the rate of the same strategy at full precision, if that is there."""
    groups = models_of(settings.contenders, settings.share_curves)
    models = {contender.label: model for model, group in groups.items() for contender in group}
    short = {each: each.name.replace(f"+{each.wire}", "") for each in settings.contenders if not settings.search.wires}
    named = [(models[each.label], replace(each, name=name).label) for each, name in short.items() if name != each.name]
    exact = {model: models.get(label) for model, label in named}
    return {model: other for model, other in exact.items() if other is not None}


def _train(
    settings: Settings,
    runner: CellRunner,
    models: Mapping[str, Contender],
    trials: Iterable[Trial],
    steps: int,
    target: float | None,
) -> dict[str, list[Run]]:
    """Train every model once for each seed, in rotating order, with the learning rate of the search. In comparisons,
    held-out fields of the phantom and the dense model are kept, to be drawn.
    """
    rates = {trial.model: trial.lr for trial in trials if trial.chosen}
    rates |= {model: rates[other] for model, other in same_rate(settings).items() if other in rates}
    runs: dict[str, list[Run]] = {model: [] for model in models}
    for seed in range(settings.seeds):
        for model in in_turn(list(models), seed):
            config = settings.config(models[model], lr=rates[model], seed=seed, steps=steps, target=target)
            function = models[model].function[0]
            drawn = settings.cells == ({},) and seed == 0 and function in DRAWN
            fields = f"{DRAWN[function]}.npz" if drawn else ""
            runs[model].append(runner.train(f"{model} seed={seed} lr={config.lr:g}", config, fields))
    return runs


def in_turn(names: Sequence[T], turn: int) -> list[T]:
    """The names in an order that begins with another one each turn."""
    first = turn % len(names) if names else 0
    return [*names[first:], *names[:first]]


def to_target(run: Run, target: float, steps: int, joules: float | None) -> Run:
    """A training with the figures at its first evaluation at or below the target, and equal steps and energy."""
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


def _time_link(
    settings: Settings, runner: CellRunner, losses: Losses | None, link: str, *, on_network: bool
) -> list[Cell]:
    """Time steps of every contender on a link, seed by seed in rotating order, each with its own learning rate."""
    chosen = tuple(losses.models) if losses and not on_network else settings.contenders
    if settings.measure != "decode" and (on_network or not losses):
        chosen = choose_variants(settings, runner, link)[0]
    models = {contender.label: model for contender, model in losses.models.items()} if losses else {}
    timings: dict[Contender, list[Run]] = {contender: [] for contender in chosen}
    for seed in range(settings.seeds):
        for contender in in_turn(chosen, seed):
            lr = losses.runs[models[contender.label]][seed].lr if losses else settings.search.learning_rates[0]
            config = settings.config(contender, lr=lr, seed=seed)
            if settings.measure == "decode":  # times do not depend on arrivals
                own = tuple(pair for pair in contender.cell if pair[0] != "arrivals")
                name = timing_name(replace(contender, cell=own), seed, link)
                run = runner.decode(name, config, settings.decoding(contender))
            else:
                name = timing_name(contender, seed, link)
                run = runner.time(name, config, settings.timed_steps, limit=settings.timed_seconds)
            timings[contender].append(run)
    if losses is None:
        return [_cell(settings, contender, runs, link) for contender, runs in timings.items()]
    cells = []
    for contender, timed in timings.items():  # runs are made of shared losses and of its own time of a step
        model = models[contender.label]
        trained_by = None if losses.trained_by[model] == contender.label else losses.trained_by[model]
        differs = any(contender.label in shared.differing for shared in losses.shared)
        pairs = zip(losses.runs[model], timed, strict=True)
        runs = [shared_run(run, timing, trained_by=trained_by, differs=differs) for run, timing in pairs]
        cells.append(_cell(settings, contender, runs, link, model))
    return cells


def _cell(settings: Settings, contender: Contender, runs: Iterable[Run], link: str, model: str | None = None) -> Cell:
    config = settings.config(contender)
    decoding = settings.decoding(contender) if settings.measure == "decode" else None
    counted: dict[str, Any] = counts(config, decoding)
    if settings.profile not in (None, ASSUMED_CORE):  # a hardware profile has the peak as well
        profile = load_profile(settings.profile)
        counted["least_joules_per_step"] = least_joules(counted["flops_per_step"], profile, config.dtype)
        counted["peak_flops"] = profile.peak[config.dtype].value if config.dtype in profile.peak else None
    return Cell(
        strategy=contender.name,
        ranks=contender.ranks,
        pp=contender.pp,
        dp=contender.dp,
        batch=decoding.batch if decoding else config.batch,
        local_batch=None if decoding else config.batch // config.row_shards,
        new_tokens=decoding.tokens if decoding else None,
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


def shared_run(run: Run, timing: Run, *, trained_by: str | None = None, differs: bool = False) -> Run:
    """The training of a contender, made of the steps and losses of ``run``, a training of the same model by
    ``trained_by``, and of its own timed steps. ``differs``: it was seen to compute another model.
    """
    if not timing.steps:
        return replace(timing, lr=run.lr, trained_by=trained_by, timed_steps=0)

    def in_steps(total: float | None, steps: int = run.steps) -> float | None:
        return None if total is None else steps * total / timing.steps

    each = timing.seconds / timing.steps
    curve = [replace(at, seconds=at.step * each, joules=in_steps(timing.joules, at.step)) for at in run.curve]
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
        curve=() if differs else tuple(curve),
    )


def _measure_inference(settings: Settings, runner: CellRunner) -> dict[str, list[InferenceResult]]:
    """Inference of the models whose layers all ranks share, in comparisons, on the ranks of the first copy."""
    configs = {
        contender.name: settings.config(contender)
        for contender in settings.contenders
        if (contender.ranks, contender.pp, contender.wire) == (settings.training.get("ranks", 1), 1, EXACT_WIRE)
        and not (contender.rules.shards_rows or contender.rules.splits_depth)
    }
    if settings.cells != ({},) or settings.measure != "loss" or not configs:
        return {}
    first = next(iter(configs.values()))
    context, power = runner.context_for(first), runner.power(first.ranks)
    if context is None or context.dp_rank:
        return {}
    measured: dict[str, list[InferenceResult]] = {}
    for batch in settings.inference_batches:
        measure = get_family(settings.family).measure_inference
        values = measure(configs, context, batch, turns=settings.inference_turns, power=power)
        for name, fields in values.items():
            measured.setdefault(name, []).append(convert(fields, InferenceResult, "inference"))
    return measured
