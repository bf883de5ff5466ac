"""The planner: which strategy, on how many ranks, with how many ghosts, for a given model, batch and machine.

Every layout that the request allows is counted by `cost.terms` and timed by `cost.timing`; what does not fit is
dropped with the reason. A step trains on the same ``batch`` rows however many copies share them, so steps compare.

All strategies but phantom compute the same model. A phantom model is another one, and with few ghosts a smaller one:
how many steps it needs to the same loss is not in these numbers. `Plan.break_even` says how many it may need.
Blocks are not ranks: copies of a phantom model with all its blocks on one device are layouts like any other.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

from phantom_parallel.cost.hardware import WORD_BYTES, Fraction, Profile
from phantom_parallel.cost.terms import Shape
from phantom_parallel.cost.timing import Clock, StepTime
from phantom_parallel.families.registry import get_family
from phantom_parallel.utils import strategies
from phantom_parallel.utils.layout import nearest_divisors, positive
from phantom_parallel.utils.settings import PositiveFloat, PositiveInt, validate
from phantom_parallel.utils.strategies import DEFAULT_GHOSTS, PLANNED, PlannedName, WireFormat

Goal = Literal["time", "energy", "devices"]

MODELS = Path(__file__).parent / "models.toml"  # sizes of well-known models
HEADROOM = 0.1  # of a device's memory, for temporary buffers and the allocator, when the user sets no limit
GIB = 2**30
MODELLED_FROM = 16  # devices from which strategies that cannot run are compared, and ranks of a grid


class Layout(NamedTuple):
    """How a model is laid out: ``ranks`` share each of ``pp`` stages by a strategy, and ``dp`` copies of that train it.

    Blocks and ghosts belong to phantom, and to lowrank, which has that phantom model's parameters; micro-batches to
    pipelines, ``reshard_after_forward`` to fsdp, ``grid`` to tensor-2d and ``channels`` to caat-net.
    """

    strategy: PlannedName
    ranks: int
    dp: int
    blocks: int | None = None
    ghosts: int | None = None
    micro_batches: int | None = None
    reshard_after_forward: bool = True
    pp: int = 1
    grid: int = 1
    channels: float = 1.0

    def filled(self) -> "Layout":
        """The same layout with the defaults of the strategy for what is left out."""
        layout, stages = self, self.ranks if self.rules.splits_depth else self.pp
        if stages > 1 and self.micro_batches is None:
            layout = self._replace(micro_batches=stages)
        if not self.rules.sized_by_blocks:
            return layout
        blocks = strategies.default_blocks(self.ranks) if self.blocks is None else self.blocks
        return layout._replace(blocks=blocks, ghosts=DEFAULT_GHOSTS if self.ghosts is None else self.ghosts)

    @property
    def rules(self) -> strategies.Strategy:
        return PLANNED[self.strategy]

    @property
    def devices(self) -> int:
        return self.ranks * self.pp * self.dp

    @property
    def inside(self) -> int:
        """Ranks that share a block; 1 where ranks hold whole blocks, or where there are none."""
        return max(1, self.ranks // self.blocks) if self.blocks and self.rules.has_blocks else 1

    def __str__(self) -> str:
        shared = f" of {self.inside} ranks" if self.inside > 1 else ""
        more = f", {self.blocks} blocks{shared}, {self.ghosts} ghosts" if self.blocks else ""
        more += f", {self.micro_batches} micro-batches" if self.micro_batches else ""
        more += "" if self.reshard_after_forward else ", weights kept"
        more += f", pp {self.pp}" if self.pp > 1 else ""
        return f"{self.strategy} on {self.ranks} rank{'s' * (self.ranks > 1)}{more}" + (
            f", dp {self.dp}" if self.dp > 1 else ""
        )


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model that is planned or dry-run, apart from its layout. ValueError if there is no such model."""

    family: str
    settings: dict[str, Any]  # of the family's shape and of its model, but those of `Layout`

    def __post_init__(self) -> None:
        assert self.config is not None  # sizes that are not possible raise here

    @cached_property
    def config(self) -> Any:
        """Config of the model that computes the dense function."""
        family = get_family(self.family)
        settings = {name: value for name, value in self.settings.items() if name != "low_rank"}
        return family.shape.of(**settings, strategy=family.baseline).model

    def shape(self, layout: Layout, *, batch: int, **run: Any) -> Shape:
        """The shape of a step on ``batch`` rows over all data-parallel copies; ``run`` are its further settings:
        ``word_bytes``, ``wire``, ``optimizer``, ``rank``. ValueError if the model cannot be laid out like this.
        """
        positive(dp=layout.dp, batch=batch)
        if batch % layout.dp:
            raise ValueError(f"dp={layout.dp} does not divide batch={batch}: use {nearest_divisors(batch, layout.dp)}")
        family, given, default = get_family(self.family), layout.filled()._asdict(), Layout._field_defaults
        settings = {name: value for name, value in given.items() if name not in default or value != default[name]}
        settings = self.settings | settings | {"batch": batch // layout.dp} | run
        if layout.strategy in family.shape.modelled:
            settings["strategy"] = family.baseline
        if not layout.rules.splits_layers or layout.pp > 1:
            settings.pop("interleave", None)  # there are no exchanges to overlap, or other micro-batches
        return family.shape.of(**settings)


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """What to plan, apart from the model and the machine."""

    batch: PositiveInt
    """Rows (sequences) of one step, over all data-parallel copies."""
    devices: PositiveInt
    """The most devices to use."""
    strategy: tuple[PlannedName, ...] = ()
    """The strategies to compare; by default all, and from 16 devices on those that are only modelled."""
    blocks: tuple[PositiveInt, ...] = ()
    """Blocks of a phantom model; if left out, as many as ranks, and fewer that ranks of a node share; on one rank, as
    many as copies."""
    ghosts: tuple[PositiveInt, ...] = (DEFAULT_GHOSTS,)
    """Ghosts of a phantom model."""
    dp: tuple[PositiveInt, ...] = ()
    """Data-parallel copies; whatever divides the batch if left out."""
    pp: tuple[PositiveInt, ...] = ()
    """Stages of a pipeline that has ranks of another strategy in each; any number up to the layers if left out."""
    micro_batches: tuple[PositiveInt, ...] = ()
    """Micro-batches of a pipeline; if left out, its stages times powers of two, as far as they divide the rows."""
    channels: Fraction = 0.5
    """The share of a layer's output channels that caat-net sums over ranks."""
    memory_gib: PositiveFloat | None = None
    """Memory of a device that may be used; the profile's less 10 % if left out."""
    goal: Goal = "time"
    """What the best plan has the least of."""
    dtype: str = "fp32"
    """The type of every number: one that the profile has a peak for."""
    wire: WireFormat = "full"
    """The format in which features are sent between the ranks that share a model."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest(PlanSettings):
    """What to plan: a model and a machine, and the `PlanSettings`."""

    model: ModelSizes
    profile: Profile

    def __post_init__(self) -> None:
        validate(self)
        running, modelled = planned_strategies(self.model.family)
        compared = running + (modelled if self.devices >= MODELLED_FROM else ())
        object.__setattr__(self, "strategy", self.strategy or compared)
        for strategy in self.strategy:
            strategies.get_strategy(strategy, running + modelled)
        self.profile.require_dtype(self.dtype)
        self.profile.require_devices(self.devices)
        if self.goal == "energy" and not self.profile.has_power:
            raise ValueError(f"profile {self.profile.name!r} has no watts, so no energies: plan for time or devices")
        if max(self.dp, default=1) > self.devices:
            raise ValueError(f"dp={max(self.dp)} needs more than {self.devices} devices: use at most {self.devices}")
        for blocks in self.blocks:  # blocks that are not possible raise here
            ghosts = min(self.ghosts) if blocks == min(self.blocks) else 1
            self.model.shape(Layout("phantom", 1, 1, blocks, ghosts), batch=1)
        most = min(n_in for n_in, _ in self.model.config.linear_features) // 2  # the features of one of two blocks
        if "phantom" in self.strategy and min(self.ghosts) > most:
            raise ValueError(f"ghosts={min(self.ghosts)} exceeds the features of a block: use at most {most}")

    @property
    def memory_limit(self) -> float:
        """Bytes of a device that may be used."""
        return self.memory_gib * GIB if self.memory_gib else (1 - HEADROOM) * self.profile.memory_bytes.value

    @property
    def summary(self) -> str:
        """The model and what it is planned for, for titles."""
        return f"{self.model.config.summary}, batch {self.batch:,}, {self.dtype}{strategies.wire_suffix(self.wire)}"


def planned_strategies(family: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The strategies of a family that are compared: those that run, and those that are only modelled."""
    chosen = get_family(family)
    return chosen.strategies, chosen.shape.modelled


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with its step. Energies are modelled; None where the profile has no watts."""

    layout: Layout
    step: StepTime
    memory_bytes: int
    parameters: int  # of the whole model
    wire: WireFormat = "full"

    @property
    def devices(self) -> int:
        return self.layout.devices

    @property
    def seconds(self) -> float:
        return self.step.total

    @property
    def joules(self) -> float | None:
        return self.step.joules

    @property
    def same_model(self) -> bool:
        return self.layout.rules.same_model


class Dropped(NamedTuple):
    """A layout that was left out, and why. ``needs``: the bytes that were too many, if it was memory."""

    layout: Layout
    reason: str
    needs: int | None = None


@dataclass(frozen=True)
class Plan:
    """The answer: all that fits, and why the rest does not."""

    request: PlanRequest
    candidates: tuple[Candidate, ...]
    dropped: tuple[Dropped, ...]

    @property
    def ranked(self) -> list[Candidate]:
        """Layouts of the dense model and then of each phantom model, the best under the goal first in each."""

        def key(candidate: Candidate) -> tuple[float, ...]:
            sizes = candidate.layout.ghosts or 0, candidate.layout.blocks or 0
            return not candidate.same_model, *sizes, *rank_by(self.request.goal, candidate)

        return sorted(self.candidates, key=key)

    @property
    def best_of_each(self) -> list[Candidate]:
        """The best layout of each strategy that computes the dense model, then of lowrank and phantom by ghosts."""
        best: dict[tuple[str, int], Candidate] = {}
        for candidate in sorted(self.candidates, key=lambda candidate: rank_by(self.request.goal, candidate)):
            best.setdefault((candidate.layout.strategy, candidate.layout.ghosts or 0), candidate)
        return sorted(best.values(), key=lambda c: (not c.same_model, c.layout.rules.has_blocks, c.layout.ghosts or 0))

    @property
    def missing(self) -> dict[str, str]:
        """Strategies without a layout that fits, each with the reason."""
        reasons = dict[str, str]()
        for strategy in self.request.strategy:
            own = [entry for entry in self.dropped if entry.layout.strategy == strategy]
            if any(c.layout.strategy == strategy for c in self.candidates):
                continue
            heavy = [entry for entry in own if entry.needs is not None]
            least = min(heavy or own, key=lambda entry: entry.needs or 0, default=None)
            reason = least.reason if least else f"no layout on up to {self.request.devices} devices"
            reasons[strategy] = f"{least.layout} {reason}" if least and heavy else f"{strategy}: {reason}"
        return reasons

    @property
    def best_dense(self) -> Candidate | None:
        """The best layout that computes the dense model."""
        dense = [candidate for candidate in self.candidates if candidate.same_model]
        return min(dense, key=lambda candidate: rank_by(self.request.goal, candidate), default=None)

    def break_even(self, candidate: Candidate) -> tuple[float | None, float | None]:
        """How many times the dense model's steps a phantom model may need before the dense layout with the least time
        takes less time, and the one with the least energy less energy; None where either side is unknown.
        """
        dense = [other for other in self.candidates if other.same_model]
        if candidate.same_model or not dense:
            return None, None
        joules = min((other.joules for other in dense if other.joules), default=None)
        energy = joules / candidate.joules if joules and candidate.joules else None
        return min(other.seconds for other in dense) / candidate.seconds, energy


def rank_by(goal: Goal, candidate: Candidate) -> tuple[float, ...]:
    """The goal first; the others break ties."""
    measures = {"time": candidate.seconds, "energy": candidate.joules or 0.0, "devices": float(candidate.devices)}
    return (measures.pop(goal), *measures.values())


def plan(request: PlanRequest) -> Plan:
    """Time every layout of a model. ValueError if nothing fits: the message says why."""
    candidates, dropped = _evaluate(request, _layouts(request, _counts(request.devices)))
    answer = Plan(request, tuple(candidates), tuple(dropped))
    if not candidates:
        raise ValueError(f"nothing fits: {'; '.join(list(answer.missing.values())[:3])}")
    return answer


def scaling(request: PlanRequest) -> dict[str, list[Candidate]]:
    """For each strategy, the best on exactly so many devices at the same batch. Counts at which none fits are left out.

    Phantom has curves for the fewest and for the most ghosts requested, each with a block or more on a rank, and on two
    levels, with several ranks in a block.
    """
    ends = tuple(sorted({min(request.ghosts), max(request.ghosts)}))
    curves: dict[str, list[Candidate]] = {}
    for count in (2**power for power in range(1, 13) if 2**power <= request.devices):
        at_count = replace(request, devices=max(count, *request.dp, 1), ghosts=ends)
        layouts = (layout for layout in _layouts(at_count, _counts(count)) if layout.devices == count)
        best: dict[str, Candidate] = {}
        for candidate in _evaluate(at_count, layouts)[0]:
            ghosts = candidate.layout.ghosts
            name = candidate.layout.strategy + (f", {ghosts} ghosts" if ghosts else "")
            name += ", two-level" if candidate.layout.inside > 1 else ""
            if name not in best or rank_by(request.goal, candidate) < rank_by(request.goal, best[name]):
                best[name] = candidate
        for name, candidate in best.items():
            curves.setdefault(name, []).append(candidate)
    return curves


def _counts(devices: int) -> list[int]:
    """Numbers of ranks and of copies that are considered: powers of two, and divisors of the devices."""
    powers = {2**power for power in range(devices.bit_length()) if 2**power <= devices}
    return sorted(powers | {count for count in range(1, devices + 1) if devices % count == 0})


def _layouts(request: PlanRequest, counts: list[int]) -> Iterator[Layout]:
    depth = request.model.config.depth if "pp" in get_family(request.model.family).shape.__dataclass_fields__ else 1
    stages = [count for count in request.pp or counts if count <= depth] or [1]
    for name, ranks, pp, copies in product(request.strategy, counts, stages, request.dp or counts):
        layout = Layout(name, ranks, copies, pp=pp)
        if layout.devices > request.devices or (pp > 1 and not layout.rules.splits_layers):
            continue
        if (count := layout.filled().micro_batches) is None:
            yield from _in_stage(request, layout)
            continue
        more = (count << power for power in range(1, request.batch.bit_length()))
        possible = [count, *(number for number in more if request.batch // copies % number == 0)]
        for number in request.micro_batches or possible:
            yield from _in_stage(request, layout._replace(micro_batches=number))


def _in_stage(request: PlanRequest, layout: Layout) -> Iterator[Layout]:
    """The layouts of a strategy on the ranks of a stage."""
    strategy, ranks = layout.rules, layout.ranks
    if strategy.sized_by_blocks:
        for blocks in request.blocks or _block_choices(request, ranks, layout.pp * layout.dp):
            for ghosts in request.ghosts:
                if request.blocks or ghosts % max(1, ranks // blocks) == 0:  # else ranks cannot share them
                    yield layout._replace(blocks=blocks, ghosts=ghosts)
    elif strategy.single_rank != (ranks == 1):
        return
    elif strategy.shards_rows:
        yield from (layout, layout._replace(reshard_after_forward=False))
    elif layout.strategy == "tensor-2d":
        sides = [side for side in range(2, ranks) if ranks % side == 0] if ranks >= MODELLED_FROM else []
        yield from (layout._replace(grid=side) for side in sides)
    else:
        yield layout._replace(channels=request.channels) if strategy.partial else layout


def _block_choices(request: PlanRequest, ranks: int, copies: int) -> Iterator[int]:
    """As many blocks as ranks; and fewer, each shared by the ranks of a node, of a part of one or of two nodes. On one
    rank, copies have the model that as many ranks would share.
    """
    if ranks == 1 and copies > 1:
        yield copies
    node = int(request.profile.devices_per_node.value)
    for inside in range(1, 2 * node + 1):
        if ranks % inside == 0 and ranks >= 2 * inside and (node % inside == 0 or inside % node == 0):
            yield ranks // inside


def _evaluate(request: PlanRequest, layouts: Iterable[Layout]) -> tuple[list[Candidate], list[Dropped]]:
    clock = Clock(request.profile, request.dtype)
    candidates, dropped = [], []
    for layout in layouts:
        try:
            words = WORD_BYTES[request.dtype]
            shape = request.model.shape(layout, batch=request.batch, word_bytes=words, wire=request.wire)
        except ValueError as error:
            dropped.append(Dropped(layout, str(error)))
            continue
        needs = max(stage.memory.total for stage, _ in shape.stages())
        if needs > request.memory_limit:
            reason = f"needs {needs / GIB:.3g} GiB a device, more than {request.memory_limit / GIB:.3g}"
            dropped.append(Dropped(layout, reason, needs))
            continue
        candidates.append(Candidate(layout, clock.step(shape), needs, shape.model_parameters, request.wire))
    return candidates, dropped
