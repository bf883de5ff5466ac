"""``phantom plan``: strategies, ranks and ghosts compared for a model, a batch and a machine."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from phantom_parallel.cli import options
from phantom_parallel.cli.options import Flag, JsonOption, ModelOptions, WireOption
from phantom_parallel.cost.hardware import load_profile
from phantom_parallel.cost.planner import Candidate, Plan, PlanRequest, PlanSettings, plan, planned_strategies, scaling
from phantom_parallel.study.units import format_ratio, quantity
from phantom_parallel.utils.files import json_text
from phantom_parallel.utils.parsing import decode_json
from phantom_parallel.utils.strategies import STRATEGIES


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ModelOptions, WireOption, PlanSettings, JsonOption):
    """Compare the best layouts of every strategy for a model, a batch and a machine, by a model of time and energy.

    A phantom model is not the dense model. Its break-even is how many times the dense model's steps it may need to the
    same loss before the best layout of the dense model wins. Every time and energy is modelled, none measured:
    docs/planning.md states the assumptions, and phantom machine show shows the figures behind them.
    """

    hardware: str = "dgx-a100"
    """A hardware profile's name, or the path of a .toml file."""
    tuned: Path | None = None
    """The folder of a phantom tune: blocks and ghosts are those that it recommends or came nearest with, and the steps
    that they needed are compared with the break-even."""
    all: Flag = False
    """Show every layout, and not only the best of each strategy."""

    def run(self) -> None:
        settings, steps = {field.name: getattr(self, field.name) for field in fields(PlanSettings)}, None
        if self.tuned is not None:
            path = self.tuned / "tune.json" if self.tuned.is_dir() else self.tuned
            best = decode_json(path.read_bytes(), dict[str, Any], str(path)).get("best")
            if not best:
                raise ValueError(f"{path} has no phantom model that reached the loss: give --blocks and --ghosts")
            if best.get("parallel_block") and not self.model_sizes.settings.get("parallel_block"):
                raise ValueError(f"{path} recommends parallel blocks: give --parallel-block")
            settings |= {"blocks": (best["blocks"],), "ghosts": (best["ghosts"],)}
            steps = best["steps_ratio"]["mean"]
        answer = plan(PlanRequest(model=self.model_sizes, profile=load_profile(self.hardware), **settings))
        if self.json:
            print(json_text(as_data(answer, scaling(answer.request))))
            return
        console = Console(highlight=False)
        for part in (*_headline(answer, steps), *_tables(answer, self.all)):
            console.print(part, markup=False)


def options_for(family: str | None, arguments: list[str]) -> tuple[type[PlanOptions], dict[str, Any]]:
    """The options for models of a family."""
    family, sizes = options.model_defaults(family, arguments)
    names = sum(planned_strategies(family), ())
    choices = tuple[Literal[names], ...]  # type: ignore[valid-type]
    return options.with_sizes(PlanOptions, family, "plan", sizes, strategy=(choices, ())), sizes


def as_row(answer: Plan, candidate: Candidate) -> dict[str, Any]:
    """A layout as a flat record. Energies are None where the profile has no watts."""
    layout, step = candidate.layout, candidate.step
    time, energy = answer.break_even(candidate)
    return {
        **layout._asdict(),
        "devices": candidate.devices,
        "ranks_per_block": layout.inside if layout.blocks else None,
        "reshard_after_forward": layout.reshard_after_forward if layout.strategy == "fsdp" else None,
        "step_seconds": candidate.seconds,
        "compute_seconds": step.compute,
        "exposed_communication_seconds": step.exposed,
        "hidden_communication_seconds": step.hidden,
        "idle_seconds": step.idle,
        "modelled_joules_per_step": candidate.joules,
        "modelled_joules_per_sample": None if candidate.joules is None else candidate.joules / answer.request.batch,
        "least_joules_per_step": step.least_joules,
        "least_exchange_joules_per_step": step.least_exchange_joules,
        "energy_gap": step.energy_gap,
        "mfu": step.mfu,
        "memory_bytes_per_device": candidate.memory_bytes,
        "model_parameters": candidate.parameters,
        "computes_the_dense_model": candidate.same_model,
        "break_even_time": time,
        "break_even_energy": energy,
    }


def as_data(answer: Plan, curves: Mapping[str, Sequence[Candidate]]) -> dict[str, Any]:
    """The whole answer for JSON, with the curves of `scaling`."""
    request, dense = answer.request, answer.best_dense
    settings = {name: getattr(request, name) for name in ("batch", "devices", "dtype", "wire", "goal")}
    settings |= {"hardware": request.profile.name, "memory_limit_bytes": request.memory_limit}

    def rows(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
        return [as_row(answer, candidate) for candidate in candidates]

    return {
        "request": {"family": request.model.family, **request.model.settings, **settings},
        "energy_provenance": "modelled" if request.profile.has_power else "unavailable",
        "best_of_the_dense_model": as_row(answer, dense) if dense else None,
        "best_of_each_strategy": rows(answer.best_of_each),
        "candidates": rows(answer.ranked),
        "dropped": [{**entry.layout._asdict(), "reason": entry.reason} for entry in answer.dropped],
        "scaling": {name: rows(curve) for name, curve in curves.items()},
    }


def _headline(answer: Plan, steps: float | None) -> Iterator[str]:
    """The answer in a few lines; ``steps``: those that the phantom model needed, relative to the dense model's."""
    dense = answer.best_dense
    if dense:
        energy = "" if dense.joules is None else f", {quantity(dense.joules, 'J')}"
        yield f"Dense model: {quantity(dense.seconds, 's')}{energy} a step by {dense.layout}"
    for candidate in answer.best_of_each:
        limits = dict(zip(("time", "energy"), answer.break_even(candidate), strict=True))
        known = {name: limit for name, limit in limits.items() if limit is not None}
        layout = candidate.layout
        if not known or not layout.rules.has_blocks:
            continue
        model = f"Phantom, {layout.blocks} blocks, {layout.ghosts} ghosts"
        if steps is None:
            words = " and ".join(f"{format_ratio(limit)} times (for {name})" for name, limit in known.items())
            yield f"{model}: pays below {words} the dense model's steps to a loss"
        else:
            costs = " and ".join(f"{format_ratio(steps / limit)} of the {name}" for name, limit in known.items())
            yield f"{model}: {format_ratio(steps)} times the steps, {costs} to the loss"
    if not answer.request.profile.has_power:
        yield f"Energy is unavailable: profile {answer.request.profile.name!r} has no watts."


def _tables(answer: Plan, every: bool) -> Iterator[Table | str]:
    request, candidates = answer.request, answer.ranked if every else answer.best_of_each
    shown = "every layout" if every else f"each strategy's best for {request.goal}"
    title = f"{request.summary}, {request.devices:,} devices of {request.profile.name}: {shown}"
    yield _table(answer, title, candidates, every)
    for reason in answer.missing.values():
        yield f"Left out: {reason}"
    if not every and len(answer.candidates) > len(candidates):
        yield f"{len(answer.candidates):,} layouts fit: --all shows them."
    if every and answer.dropped:
        reasons = "; ".join(f"{entry.layout}: {entry.reason}" for entry in answer.dropped[:3])
        yield f"{len(answer.dropped)} layouts left out, such as {reasons}."


def _table(answer: Plan, title: str, candidates: Sequence[Candidate], every: bool) -> Table:
    """Parameters of the best layouts; of every layout, what it makes of the devices."""
    notes: dict[str, Callable[[Candidate], object]] = {
        "times and energies are modelled": bool,
        "break-even: how many times the dense model's steps phantom may need until the best dense layout wins": (
            lambda c: not c.same_model
        ),
        "4x2: 4 blocks, each shared by 2 ranks": lambda c: c.layout.inside > 1,
        "lowrank has the weights of phantom with these blocks and ghosts": lambda c: c.layout.rules.low_rank,
        "tensor-2d (inputs x outputs) and caat-net cannot run here": lambda c: c.layout.strategy not in STRATEGIES,
        "/8: 8 micro-batches": lambda c: c.layout.micro_batches,
        "pp: stages of so many ranks each": lambda c: c.layout.pp > 1,
        "fsdp, kept: whole weights are kept from forward to backward": lambda c: not c.layout.reshard_after_forward,
        "MFU: % of the peak; gap: % of energy above that of the FLOPs at the peak": lambda c: every,
    }
    caption = "; ".join(note for note, applies in notes.items() if any(map(applies, candidates)))
    shown = ("MFU", "gap") if every else ("weights",)
    staged = any(c.layout.pp > 1 for c in candidates)
    columns = ("ranks", *["pp"] * staged, "dp", "blocks", "ghosts", "step", "energy", "memory", *shown)
    columns = (*columns, "break-even\ntime, energy")
    table = options.make_table(("strategy", *columns), title=title, caption=caption, padding=(0, 0, 0, 0))
    for c in candidates:
        s = c.layout
        blocks = f"{s.blocks}x{s.inside}" if s.inside > 1 else s.blocks
        blocks = f"{s.grid}x{s.ranks // s.grid}" if s.grid > 1 else blocks
        sizes = (s.ranks, *[s.pp] * staged, s.dp, blocks, s.ghosts)
        counts = [str(count) if count else "-" for count in sizes]
        name = s.strategy + ("" if s.micro_batches is None else f"/{s.micro_batches}")
        name += "" if s.reshard_after_forward else ", kept"
        weights = f"{c.parameters / 1e6:,.3g}M" if c.parameters < 1e9 else f"{c.parameters / 1e9:,.3g}G"
        shares = ["-" if share is None else f"{100 * share:,.3g}" for share in (c.step.mfu, c.step.energy_gap)]
        table.add_row(
            name,
            *counts,
            quantity(c.seconds, "s"),
            "-" if c.joules is None else quantity(c.joules, "J"),
            quantity(c.memory_bytes, "B"),
            *(shares if every else [weights]),
            ", ".join(format_ratio(limit) for limit in answer.break_even(c) if limit is not None) or "-",
        )
    return table
