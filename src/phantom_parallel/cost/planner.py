"""The planner: which strategy, on how many ranks, with how many ghosts, for a given model, batch and machine.

Every layout that the request allows is counted by `cost.terms` and timed by `cost.timing`; what does not fit is
dropped with the reason. A step trains on the same ``batch`` rows however many copies share them, so steps compare.

All strategies but phantom compute the same model. A phantom model is another one, and with few ghosts a smaller one:
whether it reaches the same loss is not in these numbers. ``min_ghosts`` is the fewest that are known to keep the loss.
Blocks are not ranks: copies of a phantom model with all its blocks on one device are layouts like any other.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from phantom_parallel.cost.hardware import WORD_BYTES, Profile
from phantom_parallel.cost.sizes import Layout, ModelSizes, rows_per_copy
from phantom_parallel.cost.terms import Optimizer, Shape
from phantom_parallel.cost.timing import Clock, StepTime
from phantom_parallel.utils.layout import positive
from phantom_parallel.utils.strategies import StrategyName, get_strategy
from phantom_parallel.utils.wire import WireFormat, check_wire

Goal = Literal["time", "energy", "devices"]

GHOST_SWEEP = (4, 8, 16, 32, 64)
SCALING_COUNTS = tuple(2**power for power in range(1, 13))
HEADROOM = 0.1  # of a device's memory, for temporary buffers and the allocator, when the user sets no limit
GIB = 2**30
NOT_COMPARED = "not compared"
TWO_LEVEL = ", two-level"  # in names of curves


@dataclass(frozen=True)
class PlanRequest:
    """What to plan.

    Args:
        model: The sizes of the model.
        batch: Rows of one step, over all data-parallel copies.
        devices: The most devices to use.
        profile: The machine.
        dtype: The type of every number.
        wire: The format in which features travel between the ranks that share a model.
        goal: What the best plan has the least of.
        strategies: By default all that the model's family has.
        blocks: By default as many as ranks, and fewer that the ranks of a node, a part of one or two nodes share; or on
            one rank as many as copies.
        ghosts: By default powers of two that make phantom smaller than the dense model.
        min_ghosts: The fewest ghosts that are known to keep the loss.
        dp: Data-parallel copies; by default whatever divides the batch.
        micro_batches: Of a pipeline; by default powers of two times its ranks that divide the rows of a copy.
        memory_bytes: Memory of a device that may be used; by default the device's less 10 %.
        optimizer: By its state.
    """

    model: ModelSizes
    batch: int
    devices: int
    profile: Profile
    dtype: str = "fp32"
    wire: WireFormat = "full"
    goal: Goal = "time"
    strategies: tuple[StrategyName, ...] = ()
    blocks: tuple[int, ...] = ()
    ghosts: tuple[int, ...] = ()
    min_ghosts: int | None = None
    dp: tuple[int, ...] = ()
    micro_batches: tuple[int, ...] = ()
    memory_bytes: float | None = None
    optimizer: Optimizer = "adam"

    def __post_init__(self) -> None:
        sizes = [("batch", self.batch), ("devices", self.devices)]
        sizes += [
            (name, value) for name in ("blocks", "ghosts", "dp", "micro_batches") for value in getattr(self, name)
        ]
        sizes += [("min_ghosts", self.min_ghosts)] if self.min_ghosts is not None else []
        for name, value in sizes:
            positive(**{name: value})
        if self.goal not in get_args(Goal):
            raise ValueError(f"goal must be one of {', '.join(get_args(Goal))}, got {self.goal!r}")
        check_wire(self.wire)
        if not self.strategies:
            object.__setattr__(self, "strategies", self.model.strategies)
        for strategy in self.strategies:
            get_strategy(strategy, self.model.strategies)
        self.profile.require_dtype(self.dtype)
        self.profile.require_devices(self.devices)
        if self.goal == "energy" and not self.profile.has_power:
            raise ValueError(
                f"profile {self.profile.name!r} has no watts, so no energies: plan for time or devices, "
                "or give compute_watts, communication_watts and idle_watts in a profile of your own"
            )
        if self.memory_bytes is not None and not self.memory_bytes > 0:
            raise ValueError(f"the memory limit must be positive, got {self.memory_bytes}")
        self._check_model()
        self._check_choices()

    def _check_model(self) -> None:
        """Raise ValueError if the model cannot be built at all, or not with any of the blocks and ghosts given."""
        if "dense" in self.model.strategies:
            self.model.shape(Layout("dense", 1, 1), batch=1)
        smallest = min(self.ghosts, default=self.min_ghosts or 1)
        for blocks in self.blocks:
            self.model.shape(Layout("phantom", 1, 1, blocks, 1), batch=1)
        if self.blocks:
            self.model.shape(Layout("phantom", 1, 1, min(self.blocks), smallest), batch=1)
        elif smallest > self.model.most_ghosts:
            raise ValueError(f"ghosts={smallest} is more than a block can show: use at most {self.model.most_ghosts}")

    def _check_choices(self) -> None:
        for copies in self.dp:
            rows_per_copy(self.batch, copies)
            if copies > self.devices:
                raise ValueError(f"dp={copies} needs more than {self.devices} devices: use at most {self.devices}")
        if self.min_ghosts and self.ghosts and max(self.ghosts) < self.min_ghosts:
            raise ValueError(f"every one of ghosts={self.ghosts} is below min_ghosts={self.min_ghosts}: raise them")

    @property
    def memory_limit(self) -> float:
        return self.memory_bytes or (1 - HEADROOM) * self.profile.memory_bytes.value

    @property
    def ghost_choices(self) -> tuple[int, ...]:
        if self.ghosts:
            return self.ghosts
        return (self.min_ghosts, 2 * self.min_ghosts, 4 * self.min_ghosts) if self.min_ghosts else GHOST_SWEEP


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with its step. Energies are modelled; None where the profile has no watts."""

    layout: Layout
    step: StepTime
    memory_bytes: int
    parameters: int  # of the whole model
    samples: int  # of one step
    loss: str

    @property
    def devices(self) -> int:
        return self.layout.ranks * self.layout.dp

    @property
    def seconds(self) -> float:
        return self.step.total

    @property
    def joules(self) -> float | None:
        return self.step.energy.joules if self.step.energy else None

    @property
    def joules_per_sample(self) -> float | None:
        return None if self.joules is None else self.joules / self.samples

    @property
    def same_model(self) -> bool:
        return get_strategy(self.layout.strategy).same_model


class Dropped(NamedTuple):
    """A layout that was left out, and why. ``needs``: the bytes that were too many, if it was memory."""

    layout: Layout
    reason: str
    needs: int | None = None


@dataclass(frozen=True)
class Plan:
    """The answer: all that fits, the best under the goal, and the time-energy frontier (empty without watts)."""

    request: PlanRequest
    candidates: tuple[Candidate, ...]
    dropped: tuple[Dropped, ...]

    @property
    def best(self) -> Candidate:
        return min(self.candidates, key=lambda candidate: rank_by(self.request.goal, candidate))

    @property
    def best_same_model(self) -> Candidate | None:
        """The best that computes the dense model, whose loss is not in question."""
        same = [candidate for candidate in self.candidates if candidate.same_model]
        return min(same, key=lambda candidate: rank_by(self.request.goal, candidate), default=None)

    @property
    def frontier(self) -> tuple[Candidate, ...]:
        return frontier(self.candidates)

    @property
    def frontier_same_model(self) -> tuple[Candidate, ...]:
        """The frontier of those that compute the dense model: few ghosts would leave none of them on the other."""
        return frontier(candidate for candidate in self.candidates if candidate.same_model)


def rank_by(goal: Goal, candidate: Candidate) -> tuple[float, ...]:
    """The goal first; the others break ties."""
    measures = {"time": candidate.seconds, "energy": candidate.joules or 0.0, "devices": float(candidate.devices)}
    return (measures.pop(goal), *measures.values())


def frontier(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Those that no other beats in time without costing more energy, fastest first."""
    powered = [(c.seconds, c.joules, c) for c in candidates if c.joules is not None]
    best: list[Candidate] = []
    least = float("inf")
    for _, joules, candidate in sorted(powered, key=lambda entry: entry[:2]):
        if joules < least:
            best.append(candidate)
            least = joules
    return tuple(best)


def plan(request: PlanRequest) -> Plan:
    """Time every layout of a model.

    Raises:
        ValueError: If nothing fits; the message names the nearest change that would.
    """
    candidates, dropped = _evaluate(request, _layouts(request, _counts(request.devices)))
    if not candidates:
        raise ValueError(_nearest(request, dropped))
    return Plan(request, tuple(candidates), tuple(dropped))


def scaling(request: PlanRequest, counts: tuple[int, ...] = SCALING_COUNTS) -> dict[str, list[Candidate]]:
    """For each strategy, the best on exactly so many devices at the same batch. Counts at which none fits are left out.

    Phantom has curves for the fewest and for the most ghosts requested, each with a block or more on a rank, and on two
    levels, with several ranks in a block.
    """
    most = request.profile.max_devices.value
    choices = [ghosts for ghosts in request.ghost_choices if ghosts >= (request.min_ghosts or 1)]
    ends = tuple(sorted({min(choices), max(choices)}))
    curves: dict[str, list[Candidate]] = {}
    for count in (count for count in counts if count <= most):
        at_count = replace(request, devices=max(count, *request.dp, 1), ghosts=ends)
        layouts = (s for s in _layouts(at_count, _counts(count)) if s.ranks * s.dp == count)
        best: dict[str, Candidate] = {}
        for candidate in _evaluate(at_count, layouts)[0]:
            ghosts = candidate.layout.ghosts
            name = candidate.layout.strategy + (f", {ghosts} ghosts" if ghosts else "")
            name += TWO_LEVEL if candidate.layout.inside > 1 else ""
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
    for ranks in counts:
        for copies in request.dp or counts:
            if ranks * copies > request.devices:
                continue
            for name in request.strategies:
                strategy = get_strategy(name)
                if strategy.has_blocks:
                    yield from _block_layouts(request, name, ranks, copies)
                elif strategy.single_rank == (ranks == 1):
                    yield from _other_layouts(request, Layout(name, ranks, copies))


def _other_layouts(request: PlanRequest, layout: Layout) -> Iterator[Layout]:
    strategy = get_strategy(layout.strategy)
    if strategy.shards_rows:
        yield from (layout, layout._replace(reshard_after_forward=False))
    elif strategy.splits_depth:
        yield from (layout._replace(micro_batches=count) for count in _micro_batches(request, layout))
    else:
        yield layout


def _micro_batches(request: PlanRequest, layout: Layout) -> Iterator[int]:
    """Micro-batches to consider: those of the request, or each twice as many as the one before."""
    if request.micro_batches or request.batch % layout.dp:
        yield from request.micro_batches or (layout.ranks,)
        return
    rows, count = request.batch // layout.dp, layout.ranks
    yield count  # left out with the reason if it does not divide the rows
    while 2 * count <= rows and rows % (2 * count) == 0:
        count *= 2
        yield count


def _block_layouts(request: PlanRequest, strategy: StrategyName, ranks: int, copies: int) -> Iterator[Layout]:
    sweeps_ghosts = not request.ghosts and not request.min_ghosts
    for blocks in request.blocks or _block_choices(request, ranks, copies):
        for ghosts in request.ghost_choices:
            if not request.blocks and ghosts % max(1, ranks // blocks):
                continue  # these blocks were not requested, and their ranks cannot share the ghosts
            if sweeps_ghosts and ghosts >= request.model.break_even_ghosts(blocks):
                continue  # these ghosts were not requested, and the dense model is cheaper
            yield Layout(strategy, ranks, copies, blocks, ghosts)


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
            shape = _shape(request, layout)
        except ValueError as error:
            dropped.append(Dropped(layout, str(error)))
            continue
        needs = max(stage.memory.total for stage, _ in shape.stages())
        if needs > request.memory_limit:
            reason = f"needs {needs / GIB:.3g} GiB a device, more than {request.memory_limit / GIB:.3g}"
            dropped.append(Dropped(layout, reason, needs))
            continue
        candidates.append(
            Candidate(layout, clock.step(shape), needs, shape.model_parameters, request.batch, _loss(request, layout))
        )
    return candidates, dropped


def _shape(request: PlanRequest, layout: Layout) -> Shape:
    """The shape of a step. Raises ValueError if the model cannot be laid out like this."""
    if request.min_ghosts and layout.ghosts is not None and layout.ghosts < request.min_ghosts:
        raise ValueError(f"ghosts={layout.ghosts} is below min_ghosts={request.min_ghosts}")
    word_bytes = WORD_BYTES[request.dtype]
    return request.model.step_shape(
        layout, batch=request.batch, word_bytes=word_bytes, wire=request.wire, optimizer=request.optimizer
    )


def _loss(request: PlanRequest, layout: Layout) -> str:
    if get_strategy(layout.strategy).same_model:
        return "the dense model's"
    return "kept, by your minimum" if request.min_ghosts else NOT_COMPARED


def _nearest(request: PlanRequest, dropped: list[Dropped]) -> str:
    """Why nothing is left, and the nearest thing that would work."""
    heavy = [entry for entry in dropped if entry.needs is not None]
    if not heavy:
        reasons = {entry.reason for entry in dropped} or {f"no strategy of {', '.join(request.strategies)} applies"}
        return f"nothing can run on {request.devices} devices: {'; '.join(sorted(reasons)[:3])}"
    least = min(heavy, key=lambda entry: entry.needs or 0)
    message = (
        f"nothing fits in {request.memory_limit / GIB:.3g} GiB a device: the smallest, {least.layout}, "
        f"needs {(least.needs or 0) / GIB:.3g} GiB. "
    )
    ways = [f"{count} devices" for count in _more_devices(request)]
    ways += [f"batch={batch}" for batch in _less_batch(request, least.layout)]
    if not ways:
        return message + "Neither more devices of this profile nor a smaller batch would do: give more memory"
    return message + f"It would fit with {' or with '.join(ways)}"


def _more_devices(request: PlanRequest) -> Iterator[int]:
    """The fewest devices, by doubling, on which something fits."""
    count = 2 * request.devices
    while count <= request.profile.max_devices.value:
        more = replace(request, devices=count, ghosts=(min(request.ghost_choices),))
        layouts = (s for s in _layouts(more, _counts(count)) if s.ranks * s.dp == count)
        if any(_fits(more, layout) for layout in layouts):
            yield count
            return
        count *= 2


def _less_batch(request: PlanRequest, layout: Layout) -> Iterator[int]:
    """The largest batch, by halving the rows of a copy, with which this layout fits."""
    rows = request.batch // layout.dp // 2
    while rows:
        if _fits(replace(request, batch=rows * layout.dp), layout):
            yield rows * layout.dp
            return
        rows //= 2


def _fits(request: PlanRequest, layout: Layout) -> bool:
    try:
        needs = max(stage.memory.total for stage, _ in _shape(request, layout).stages())
        return needs <= request.memory_limit
    except ValueError:
        return False
