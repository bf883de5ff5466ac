"""Comparisons: every strategy is trained to the same loss, each with the learning rate that the same search found.

search     every strategy tries the same learning rates on a seed of the search's own
target     a given loss, or the loss that every strategy reached in the search
runs       seed by seed, one strategy after the other in rotating order, so that whatever slows the machine slows all
           of them; ratios are of runs of the same seed
inference  forward passes of all strategies in turns, on the same ranks
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from phantom_parallel.families.registry import get_family
from phantom_parallel.study.analysis import caveats, ratios_of, remarks_on, summarise
from phantom_parallel.study.results import Comparison, InferenceResult, Run, Trial
from phantom_parallel.study.runner import CellRunner, RunOptions, cell_runner, run_on_ranks
from phantom_parallel.study.search import Candidate, search
from phantom_parallel.study.settings import CompareSettings
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
    configs = [settings.config(one, lr=1e-3, seed=0, steps=settings.steps) for one in settings.strategies]
    return run_on_ranks(compare_on_rank, settings, configs, out, resume, show)


def compare_on_rank(device: torch.device, settings: CompareSettings, options: RunOptions) -> Comparison:
    """Run one rank's part of a comparison; every rank returns the same results."""
    runs_to_come = settings.seeds * len(settings.strategies)
    total = len(settings.strategies) * len(settings.search.learning_rates) + runs_to_come
    with cell_runner(device, settings, options, total) as runner:
        candidates: dict[str, Candidate] = {
            strategy: partial(settings.config, strategy, seed=settings.search.seed) for strategy in settings.strategies
        }
        found = search(candidates, settings.search, runner, lambda trials: runner.expect(trials + runs_to_come))
        trials = [trial for one in found.values() for trial in one]
        target, origin = choose_target(settings, trials)
        settings = replace(settings, target_loss=target)
        runs = _train_all(settings, runner, {one.strategy: one.lr for one in trials if one.chosen})
        inference = _measure_inference(settings, runner)
    configs = {s: settings.config(s, lr=1.0, seed=0, steps=settings.steps) for s in settings.strategies}
    strategies = [summarise(s, configs[s], trials, runs, inference.get(s, ())) for s in settings.strategies]
    ratios = ratios_of(strategies, runs)
    summary = runner.summary()
    remarks = [
        *remarks_on(settings, strategies, ratios),
        *caveats(list(configs.values()), settings.seeds, summary["environment"], summary["power"].name, runner.reused),
    ]
    return Comparison(
        **summary | {"settings": summary["settings"] | {"target_loss": target}},
        target_loss=target,
        target_from=origin,
        trials=tuple(trials),
        runs=tuple(runs),
        strategies=tuple(strategies),
        ratios=tuple(ratios),
        remarks=tuple(remarks),
    )


def choose_target(settings: CompareSettings, trials: Iterable[Trial]) -> tuple[float, str]:
    """The loss that every strategy is trained to, and its origin in words."""
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


def _train_all(settings: CompareSettings, runner: CellRunner, rates: dict[str, float]) -> list[Run]:
    runs = []
    for seed in range(settings.seeds):
        turn = seed % len(settings.strategies)
        for strategy in settings.strategies[turn:] + settings.strategies[:turn]:
            config = settings.config(strategy, lr=rates[strategy], seed=seed, steps=settings.steps)
            runs.append(runner.train(f"{strategy} seed={seed} lr={config.lr:g}", config))
    return runs


def _measure_inference(settings: CompareSettings, runner: CellRunner) -> dict[str, list[InferenceResult]]:
    """Inference on the ranks of the first data-parallel copy; other ranks return nothing."""
    found: dict[str, list[InferenceResult]] = {}
    configs = {s: settings.config(s, lr=1.0, seed=0, steps=settings.steps) for s in settings.strategies}
    first = next(iter(configs.values()))
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
