"""The main job: train every strategy to the same loss, each with the learning rate that the same search found for it.

search    every strategy tries the same learning rates on a seed of its own
target    a given loss, or what every strategy came down to in the search
runs      seed by seed, the strategies one after the other in turning order, so that what slows the machine slows
          them alike; ratios are of runs of the same seed
inference forward passes of all strategies in turns, on the same ranks
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from phantom_parallel.distributed.context import ParallelContext
from phantom_parallel.energy import PowerProfile
from phantom_parallel.families.ffn.model import FFN
from phantom_parallel.families.ffn.train_config import FFNTrainConfig
from phantom_parallel.families.gpt.generation_cost import measure_generation
from phantom_parallel.families.gpt.model import GPT
from phantom_parallel.families.gpt.train_config import GPTTrainConfig
from phantom_parallel.infer.generation import GenerationCost
from phantom_parallel.infer.measure import measure
from phantom_parallel.study.analysis import ratios_of, remarks_on, summarise
from phantom_parallel.study.results import Comparison, Run, Trial
from phantom_parallel.study.runner import Lab
from phantom_parallel.study.search import Arm, search
from phantom_parallel.study.session import Errand, about, bench, send
from phantom_parallel.study.settings import CompareSettings
from phantom_parallel.train.config import TrainConfig
from phantom_parallel.utils.strategies import StrategyName

TOKENS = 10  # decoded in a turn


def compare(settings: CompareSettings, out: Path, *, resume: bool = False, show: bool = False) -> Comparison | None:
    """Run a comparison on ranks that are started here, or as one rank of those that were; what was found.

    Cells that are done are kept in ``out``, and with ``resume`` not run again. None on ranks that joined and are not
    the first.
    """
    configs = [settings.config(one, lr=1e-3, seed=0, steps=settings.steps) for one in settings.strategies]
    return send(work, settings, configs, out, resume, show)


def work(device: torch.device, settings: CompareSettings, errand: Errand) -> Comparison:
    """One rank's part; all get the same answer."""
    clock, later = time.monotonic(), settings.seeds * len(settings.strategies)
    cells = len(settings.strategies) * len(settings.search.learning_rates) + later
    with bench(device, settings, errand, cells) as (lab, display):
        arms: dict[str, Arm] = {s: partial(settings.config, s, seed=settings.search.seed) for s in settings.strategies}
        found = search(arms, settings.search, lab, lambda trials: display.expect(trials + later))
        trials = [trial for one in found.values() for trial in one]
        target, origin = target_of(settings, trials)
        settings = replace(settings, target_loss=target)
        runs = _runs(settings, lab, {one.strategy: one.lr for one in trials if one.chosen})
        inference = _inference(settings, lab)
    configs = {s: settings.config(s, lr=1.0, seed=0, steps=settings.steps) for s in settings.strategies}
    strategies = [summarise(s, configs[s], trials, runs, inference.get(s, ())) for s in settings.strategies]
    ratios = ratios_of(strategies, runs)
    return Comparison(
        **about(device, settings, errand, clock),
        target_loss=target,
        target_from=origin,
        trials=tuple(trials),
        runs=tuple(runs),
        strategies=tuple(strategies),
        ratios=tuple(ratios),
        remarks=tuple(remarks_on(settings, strategies, ratios)),
    )


def target_of(settings: CompareSettings, trials: Iterable[Trial]) -> tuple[float, str]:
    """The loss that all are trained to, and where it comes from."""
    if settings.target_loss is not None:
        return settings.target_loss, "given in the settings"
    best: dict[str, float] = {}
    for trial in trials:
        if trial.loss is not None:
            best[trial.strategy] = min(trial.loss, best.get(trial.strategy, trial.loss))
    if not best:
        raise ValueError(
            "no strategy came to a finite loss in the search for a learning rate: give smaller learning_rates"
        )
    worst = max(best, key=lambda strategy: best[strategy])
    return best[worst], (
        f"what every strategy came down to in {settings.search.steps} steps of the search for a learning rate, "
        f"the last of them {worst}"
    )


def _runs(settings: CompareSettings, lab: Lab, rates: dict[str, float]) -> list[Run]:
    runs = []
    for seed in range(settings.seeds):
        turn = seed % len(settings.strategies)
        for strategy in settings.strategies[turn:] + settings.strategies[:turn]:
            config = settings.config(strategy, lr=rates[strategy], seed=seed, steps=settings.steps)
            runs.append(lab.training(f"{strategy} seed={seed} lr={config.lr:g}", config))
    return runs


def _inference(settings: CompareSettings, lab: Lab) -> dict[str, list[dict[str, Any]]]:
    """Forward passes on the ranks of one copy; the others have nothing to tell."""
    found: dict[str, list[dict[str, Any]]] = {}
    configs = {s: settings.config(s, lr=1.0, seed=0, steps=settings.steps) for s in settings.strategies}
    first = next(iter(configs.values()))
    parallel = lab.context_for(first)
    power = lab.tell(lambda: lab.power(first.ranks))
    if parallel is None or (parallel.dp is not None and parallel.dp.get_local_rank()):
        return found
    for batch in settings.inference_batches:
        told = _forwards(configs, parallel, batch, settings.inference_turns, power)
        for name, inference in told.items():
            found.setdefault(name, []).append(inference)
    return found


def _forwards(
    configs: Mapping[StrategyName, TrainConfig], parallel: ParallelContext, batch: int, turns: int, power: PowerProfile
) -> dict[str, dict[str, Any]]:
    """A forward pass of an FFN, or a further token of a GPT behind half of its context."""
    ffns: dict[str, FFN] = {}
    gpts: dict[str, GPT] = {}
    for name, config in configs.items():
        if isinstance(config, GPTTrainConfig):
            gpts[name] = GPT(config.gpt(), mesh=parallel.tp, device=parallel.device)
            half = config.context // 2
        elif isinstance(config, FFNTrainConfig):
            ffns[name] = FFN(config.ffn(), mesh=parallel.tp, device=parallel.device)
    if ffns:
        return {name: one.to_dict() for name, one in measure(ffns, batch, turns=turns, profile=power).items()}
    prompt = torch.zeros(batch, half, dtype=torch.int64, device=parallel.device)
    told = measure_generation(gpts, prompt, tokens=min(half, TOKENS), turns=max(2, turns // TOKENS), profile=power)
    return {name: _decoding(one) for name, one in told.items()}


def _decoding(cost: GenerationCost) -> dict[str, Any]:
    """A decoded token as a forward pass of a row."""
    decode = cost.decode
    assert decode is not None
    return {
        "strategy": cost.strategy,
        "ranks": cost.ranks,
        "batch": cost.batch,
        "latency_seconds": decode.seconds,
        "latency_p95": decode.seconds_p95,
        "samples_per_second": decode.tokens_per_second,
        "flops_per_sample": decode.flops_per_token,
        "bytes_per_sample": decode.bytes_per_token,
        "joules_per_sample": decode.joules_per_token,
        "provenance": decode.provenance,
        "blocked_share": decode.blocked_share,
        "parameters": cost.parameters,
        "prefill_seconds": cost.prefill.seconds,
        "prompt": cost.prompt,
    }
