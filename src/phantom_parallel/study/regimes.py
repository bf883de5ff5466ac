"""Studies of regimes: who needs least at equal loss, depending on the link and on the batch size.

losses  for each batch size, as in a comparison with shared curves; on loopback, since no network changes them
times   for each link and batch size, timed steps of every contender in turns; time to the loss is steps times these
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from phantom_parallel.distributed.launchers import launched_externally
from phantom_parallel.families.registry import get_family
from phantom_parallel.study import networks
from phantom_parallel.study.analysis import counts, difference_in_words
from phantom_parallel.study.compare import (
    Losses,
    cells_of_losses,
    cells_of_times,
    choose_on_network,
    configs_of,
    losses_on_rank,
    runs_of,
    time_contenders,
)
from phantom_parallel.study.contenders import Contender
from phantom_parallel.study.interpretation import interpreted
from phantom_parallel.study.results import Cell, Study, Timing
from phantom_parallel.study.runner import cell_runner
from phantom_parallel.study.session import RunOptions, finish, launch_ranks, notes_on_run, prepare
from phantom_parallel.study.settings import CompareSettings, RegimeSettings, to_dict
from phantom_parallel.utils.lock import FolderLock
from phantom_parallel.utils.network import Network


@dataclass(frozen=True)
class Times:
    """Timed steps on one network.

    Args:
        contenders: Each in the variant that is best there.
        timings: Of each contender and seed.
        summary: Fields that all results share.
        cells: Cells that are finished, with those of earlier launches.
        reused: Cells that an earlier call had finished.
    """

    contenders: tuple[Contender, ...]
    timings: tuple[Timing, ...]
    summary: dict[str, Any]
    cells: int
    reused: int


def run_regime(settings: RegimeSettings, out: Path, *, resume: bool = False, show: bool = False) -> Study | None:
    """Run a study of regimes on local ranks. The arguments are those of `run_study`."""
    if launched_externally():
        raise ValueError(f"the study {settings.name} launches its ranks on several networks: start it as one process")
    if not settings.share_curves:
        raise ValueError("a study of links and batch sizes needs shared curves: leave out --no-share-curves")
    batches, links = settings.all_batches, settings.all_links
    configs = [config for batch in batches for config in configs_of(settings.at(batch=batch))]
    with FolderLock(out) as lock:
        options = prepare(settings, configs, out, resume, show, lock)
        left = len(batches) * (cells_of_losses(settings) + len(links) * cells_of_times(settings))
        cells: list[Cell] = []
        remarks: dict[str, None] = {}
        done = reused = 0
        times: Times | None = None
        for batch in batches:
            left -= cells_of_losses(settings)
            here = replace(options, network=None, label=f" batch={batch}", before=done, after=left)
            losses = launch_ranks(losses_on_rank, settings.at(batch=batch), here)
            done, reused = losses.cells, reused + losses.reused
            for link in links:
                left -= cells_of_times(settings)
                at = settings.at(batch=batch, link=link)
                network, note = networks.resolve(at, at.world_size, configs[0].dtype, out)
                if network is not None:
                    networks.keep(network, out)
                here = replace(options, network=network, label=f" batch={batch} link={link}", before=done, after=left)
                times = launch_ranks(times_on_rank, at, here, losses)
                done, reused = times.cells, reused + times.reused
                cells += cells_of(at, losses, times, link, network)
                remarks |= dict.fromkeys(_remarks(losses, link, network, note))
        assert times is not None  # there is at least one link and batch
        notes = [*notes_on_run(options, reused), *remarks]
        return finish(_study(settings, cells, times.summary, list(dict.fromkeys(notes))), options)


def times_on_rank(device: torch.device, settings: CompareSettings, options: RunOptions, losses: Losses) -> Times:
    """Run one rank's part of the timed steps on one network; every rank returns the same."""
    with cell_runner(device, settings, options, cells_of_times(settings)) as runner:
        contenders = choose_on_network(settings, runner)
        timings = time_contenders(losses, runner, contenders)
    return Times(contenders, tuple(timings), runner.summary(), runner.done, runner.reused)


def cells_of(
    settings: CompareSettings, losses: Losses, times: Times, link: str, network: Network | None
) -> Iterator[Cell]:
    """A cell for every contender and seed on one link with one batch size."""
    named = {one.name: one for one in times.contenders}
    for run in runs_of(losses, times.contenders, times.timings):
        one = named[run.strategy]
        config = settings.config(one, lr=run.lr, seed=run.seed, steps=settings.steps)
        shown = {name: getattr(config, name) for name in get_family(settings.family).shown_settings}
        identity = {"strategy": one.name, **shown, "ranks": one.ranks, "dp": one.dp, "batch": config.batch}
        if one.variant:
            identity["variant"] = one.variant
        to_the_loss = run.reached
        values: dict[str, float | None] = {
            "target": losses.settings.target_loss,
            "reached": None if run.status == "differs" else float(run.reached),
            "steps": run.steps if to_the_loss else None,
            "seconds": run.seconds if to_the_loss else None,
            "joules": run.joules if to_the_loss else None,
            "step_seconds": run.step_seconds,
            "joules_per_sample": None if run.joules is None or not run.steps else run.joules / run.steps / config.batch,
            "blocked_share": run.blocked_share,
            "link_rate": None if network is None else network.rate,
            **counts(config),
        }
        name = f"{one.name} link={link} batch={config.batch}"
        yield Cell(name, identity | {"link": link, "lr": run.lr, "seed": run.seed}, values, status=run.status)


def _remarks(losses: Losses, link: str, network: Network | None, note: str) -> Iterator[str]:
    for name, shared in losses.differing.items():
        yield f"Error: {name} has no figures to the loss, since {difference_in_words(name, shared)}."
    if note:
        yield note
    if network is not None:
        yield f"Link {link}: {network.describe()}."


def _study(settings: RegimeSettings, cells: Sequence[Cell], summary: dict[str, Any], notes: Sequence[str]) -> Study:
    environment = {name: value for name, value in summary["environment"].items() if name != "network"}
    found = Study(
        **summary | {"name": settings.name, "settings": to_dict(settings), "environment": environment, "network": None},
        question=settings.question,
        cells=tuple(cells),
        remarks=tuple(notes),
    )
    return interpreted(found)
