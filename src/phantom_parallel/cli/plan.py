"""``phantom plan``: strategies, ranks and ghosts compared for a model, a batch and a machine."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from phantom_parallel.cli.options import JsonOption, ModelOptions, WireOption, with_sizes
from phantom_parallel.cost.hardware import load_profile
from phantom_parallel.cost.planner import (
    NOT_COMPARED,
    Candidate,
    Plan,
    PlanRequest,
    PlanSettings,
    plan,
    rank_by,
    scaling,
)
from phantom_parallel.families.registry import DEFAULT_FAMILY, get_family
from phantom_parallel.study.units import quantity
from phantom_parallel.utils.files import json_text, write_json, write_text
from phantom_parallel.utils.strategies import STRATEGIES

ROWS = 20
ANOTHER_MODEL = (
    "A phantom model is not the dense model: with few ghosts it is a smaller one, and its loss is not compared here. "
    "Train to find the ghosts that keep the loss, then pass them as --min-ghosts."
)


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ModelOptions, WireOption, PlanSettings, JsonOption):
    """Compare strategies, ranks and ghosts for a model, a batch and a machine, by a model of time and energy.

    Every time and energy is modelled, none measured: docs/planning.md states the assumptions, and phantom machine show
    shows the figures behind them.
    """

    hardware: str = "dgx-a100"
    """A hardware profile's name, or the path of a .toml file."""
    out: Path | None = None
    """A folder for figures (PNG and SVG) and their numbers (CSV and JSON)."""

    def run(self) -> None:
        settings = {field.name: getattr(self, field.name) for field in fields(PlanSettings)}
        request = PlanRequest(model=self.model, profile=load_profile(self.hardware), **settings)
        answer = plan(request)
        curves = scaling(request)
        written = _write(answer, curves, self.out) if self.out else []
        if self.json:
            print(json_text(as_data(answer, curves)))
            return
        console = Console(highlight=False)
        for part in (*_headline(answer), *_tables(answer), *_scaling_tables(request, curves)):
            console.print(part, "", markup=False)
        for path in written:
            console.print(f"wrote {path}", markup=False, soft_wrap=True)


def options_for(family: str | None, arguments: list[str]) -> tuple[type[PlanOptions], dict[str, Any]]:
    """The options for models of a family."""
    family = family or DEFAULT_FAMILY
    names = tuple(name for name in get_family(family).strategies if not STRATEGIES[name].low_rank)
    choices = tuple[Literal[names], ...]  # type: ignore[valid-type]
    return with_sizes(PlanOptions, family, "plan", strategy=(choices, names)), {}


def as_row(candidate: Candidate) -> dict[str, Any]:
    """A layout as a flat record. Energies are None where the profile has no watts."""
    layout, step = candidate.layout, candidate.step
    return {
        "strategy": layout.strategy,
        "ranks": layout.ranks,
        "dp": layout.dp,
        "devices": candidate.devices,
        "blocks": layout.blocks,
        "ghosts": layout.ghosts,
        "ranks_per_block": layout.inside if layout.blocks else None,
        "micro_batches": layout.micro_batches,
        "reshard_after_forward": layout.reshard_after_forward if layout.strategy == "fsdp" else None,
        "step_seconds": candidate.seconds,
        "compute_seconds": step.compute,
        "exposed_communication_seconds": step.exposed,
        "hidden_communication_seconds": step.hidden,
        "idle_seconds": step.idle,
        "modelled_joules_per_step": candidate.joules,
        "modelled_joules_per_sample": candidate.joules_per_sample,
        "memory_bytes_per_device": candidate.memory_bytes,
        "model_parameters": candidate.parameters,
        "loss": candidate.loss,
    }


def as_data(answer: Plan, curves: dict[str, list[Candidate]]) -> dict[str, Any]:
    """The whole answer for JSON."""
    request, same = answer.request, answer.best_same_model
    return {
        "request": {
            "family": request.model.family,
            **request.model.settings,
            "batch": request.batch,
            "devices": request.devices,
            "hardware": request.profile.name,
            "dtype": request.dtype,
            "wire": request.wire,
            "goal": request.goal,
            "min_ghosts": request.min_ghosts,
            "memory_limit_bytes": request.memory_limit,
        },
        "energy_provenance": "modelled" if request.profile.has_power else "unavailable",
        "best": as_row(answer.best),
        "best_of_the_dense_model": as_row(same) if same else None,
        "frontier": [as_row(candidate) for candidate in answer.frontier],
        "frontier_of_the_dense_model": [as_row(candidate) for candidate in answer.frontier_same_model],
        "candidates": [as_row(candidate) for candidate in answer.candidates],
        "dropped": [{**entry.layout._asdict(), "reason": entry.reason} for entry in answer.dropped],
        "scaling": {name: [as_row(candidate) for candidate in curve] for name, curve in curves.items()},
    }


def _write(answer: Plan, curves: dict[str, list[Candidate]], folder: Path) -> list[Path]:
    """Figures, and beside them the numbers that they show."""
    from phantom_parallel.report.plan_figures import draw_scaling, draw_tradeoff  # matplotlib takes a second to import
    from phantom_parallel.report.tables import csv_text

    files = [folder / name for name in ("plan.json", "time-energy.csv", "scaling.csv")]
    frontier = {candidate.layout for candidate in answer.frontier}
    write_json(files[0], as_data(answer, curves))
    write_text(files[1], csv_text([{**as_row(c), "on_frontier": c.layout in frontier} for c in answer.candidates]))
    write_text(files[2], csv_text([{"curve": name, **as_row(c)} for name, curve in curves.items() for c in curve]))
    if curves:
        files += draw_scaling(answer.request, curves, folder)
    if answer.frontier:
        files += draw_tradeoff(answer, folder)
    return files


def _headline(answer: Plan) -> Iterator[str]:
    """The answer in a few lines."""
    goal, same = answer.request.goal, answer.best_same_model
    yield f"Best for {goal}: {_summary(answer.best)}"
    if same and same is not answer.best:
        yield f"Best that computes the dense model: {_summary(same)}"
    if not answer.request.profile.has_power:
        yield f"Energy is unavailable: profile {answer.request.profile.name!r} has no watts."
    if _unknown_loss(answer.candidates):
        yield ANOTHER_MODEL


def _summary(candidate: Candidate) -> str:
    energy = "" if candidate.joules is None else f", {quantity(candidate.joules, 'J')} a step (modelled)"
    return f"{candidate.layout}: {quantity(candidate.seconds, 's')} a step{energy}; loss: {candidate.loss}"


def _unknown_loss(candidates: Sequence[Candidate]) -> bool:
    return any(candidate.loss == NOT_COMPARED for candidate in candidates)


def _tables(answer: Plan) -> Iterator[Table | str]:
    request, goal = answer.request, answer.request.goal
    shown: dict[tuple[object, ...], Candidate] = {}
    for candidate in sorted(answer.candidates, key=lambda candidate: rank_by(goal, candidate)):
        s = candidate.layout
        key = (s.strategy, s.ranks, s.blocks, s.ghosts, s.reshard_after_forward)
        shown.setdefault(key, candidate)  # of the copies and micro-batches, the best
    rows = list(shown.values())
    title = f"{request.summary}, up to {request.devices:,} devices of {request.profile.name}: best for {goal} first"
    yield _table(title, rows[:ROWS])
    if len(rows) > ROWS:
        yield f"{len(rows) - ROWS} more layouts: --json or --out gives all."
    if answer.dropped:
        reasons = "; ".join(f"{entry.layout}: {entry.reason}" for entry in answer.dropped[:3])
        yield f"{len(answer.dropped)} layouts left out, such as {reasons}."
    if answer.frontier:
        yield _table("Time-energy frontier", answer.frontier)
        if answer.frontier_same_model not in ((), answer.frontier):
            yield _table("Time-energy frontier of the dense model", answer.frontier_same_model)


def _table(title: str, candidates: Sequence[Candidate]) -> Table:
    notes = {
        "+ another model: loss not compared": _unknown_loss(candidates),
        "4x2: 4 blocks, each shared by 2 ranks": any(c.layout.inside > 1 for c in candidates),
        "pipeline/8: 8 micro-batches": any(c.layout.micro_batches for c in candidates),
        "fsdp, kept: whole weights are kept from forward to backward": any(
            not c.layout.reshard_after_forward for c in candidates
        ),
    }
    caption = "; ".join(["energies are modelled", *(note for note, applies in notes.items() if applies)])
    table = Table(title=title, caption=caption, box=SIMPLE, padding=(0, 0, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    for name in ("ranks", "dp", "blocks", "ghosts", "step", "wait", "energy", "a sample", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for c in candidates:
        s = c.layout
        blocks = f"{s.blocks}x{s.inside}" if s.inside > 1 else s.blocks
        counts = [str(count) if count else "-" for count in (s.ranks, s.dp, blocks, s.ghosts)]
        times = [quantity(seconds, "s") for seconds in (c.seconds, c.step.exposed + c.step.idle)]
        joules = ["-" if value is None else quantity(value, "J") for value in (c.joules, c.joules_per_sample)]
        name = s.strategy + "+" * (c.loss == NOT_COMPARED)
        name += "" if s.micro_batches is None else f"/{s.micro_batches}"
        name += "" if s.reshard_after_forward else ", kept"
        table.add_row(name, *counts, *times, *joules, quantity(c.memory_bytes, "B"))
    return table


def _scaling_tables(request: PlanRequest, curves: dict[str, list[Candidate]]) -> Iterator[Table]:
    """Step time, and modelled energy a sample, of each strategy's best layout on so many devices. Phantom models have
    tables of their own, since both do not fit next to each other.
    """
    phantom = {name for name in curves if any(candidate.layout.blocks for candidate in curves[name])}
    for names, of in ((phantom, "phantom models"), (curves.keys() - phantom, "the dense model")):
        some = {name: curve for name, curve in curves.items() if name in names}
        if not some:
            continue
        yield _scaling_table(f"Scaling of {of}: a step, best for {request.goal}", some, "s", lambda c: c.seconds)
        if request.profile.has_power:
            title = "Modelled energy a sample of the same layouts"
            yield _scaling_table(title, some, "J", lambda c: c.joules_per_sample)


def _scaling_table(
    title: str, curves: dict[str, list[Candidate]], unit: str, number: Callable[[Candidate], float | None]
) -> Table:
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("devices", justify="right")
    columns = {name: {candidate.devices: number(candidate) for candidate in curve} for name, curve in curves.items()}
    for name in columns:
        table.add_column(name.replace(", ", ",\n"), justify="right", no_wrap=True)
    for count in sorted({count for curve in columns.values() for count in curve}):
        values = [curve.get(count) for curve in columns.values()]
        table.add_row(f"{count:,}", *("-" if value is None else quantity(value, unit) for value in values))
    return table
