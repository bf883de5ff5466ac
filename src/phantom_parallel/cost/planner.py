"""The planner: which strategy, on how many ranks, with how many ghosts, for a given model, batch and machine.

Every setting that the request allows is counted by `cost.terms` and timed by `cost.timing`; what does not fit is
dropped with the reason. A step trains on the same ``batch`` rows however many copies share them, so steps compare.

Dense, tensor and megatron compute the same model. A phantom model is another one, and with few ghosts a smaller one:
whether it reaches the same loss is not in these numbers. ``min_ghosts`` is what the user knows to keep the loss.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from phantom_parallel.cost.hardware import WORD_BYTES, Profile
from phantom_parallel.cost.terms import Optimizer, Strategy
from phantom_parallel.cost.timing import Clock, StepTime
from phantom_parallel.families.ffn.cost import FFNShape
from phantom_parallel.utils.layout import BlockLayout, nearest_divisors, positive

Goal = Literal["time", "energy", "devices"]

DEFAULT_GHOSTS = (4, 8, 16, 32, 64)
SCALING_COUNTS = tuple(2**power for power in range(1, 11))
HEADROOM = 0.1  # of a device's memory, for temporary buffers and the allocator, when the user sets no limit
GIB = 2**30
NOT_COMPARED = "not compared"


@dataclass(frozen=True)
class PlanRequest:
    """What to plan. ``batch`` is the rows of one step over all data-parallel copies; ``devices`` the most to use.

    Left out: ``blocks`` are as many as ranks, ``ghosts`` are powers of two below the dense model's size, ``dp`` is
    whatever divides the batch, ``memory_bytes`` is the device's less 10 %.
    """

    width: int
    depth: int
    batch: int
    devices: int
    profile: Profile
    dtype: str = "fp32"
    goal: Goal = "time"
    strategies: tuple[Strategy, ...] = get_args(Strategy)
    blocks: tuple[int, ...] = ()
    ghosts: tuple[int, ...] = ()
    min_ghosts: int | None = None
    dp: tuple[int, ...] = ()
    memory_bytes: float | None = None
    optimizer: Optimizer = "adam"
    activation: str = "relu"

    def __post_init__(self) -> None:
        sizes = [(name, getattr(self, name)) for name in ("width", "depth", "batch", "devices")]
        sizes += [(name, value) for name in ("blocks", "ghosts", "dp") for value in getattr(self, name)]
        sizes += [("min_ghosts", self.min_ghosts)] if self.min_ghosts is not None else []
        for name, value in sizes:
            positive(**{name: value})
        for name, value, known in (("goal", self.goal, get_args(Goal)), *self._named_strategies()):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        self.profile.require_dtype(self.dtype)
        self.profile.require_devices(self.devices)
        if self.goal == "energy" and not self.profile.has_power:
            raise ValueError(
                f"profile {self.profile.name!r} has no watts, so no energies: plan for time or devices, "
                "or give compute_watts, communication_watts and idle_watts in a profile of your own"
            )
        if self.memory_bytes is not None and not self.memory_bytes > 0:
            raise ValueError(f"the memory limit must be positive, got {self.memory_bytes}")
        self._check_choices()

    def _named_strategies(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        return (("strategy", strategy, get_args(Strategy)) for strategy in self.strategies)

    def _check_choices(self) -> None:
        for copies in self.dp:
            if self.batch % copies:
                near = nearest_divisors(self.batch, copies)
                raise ValueError(f"dp={copies} does not divide batch={self.batch}: use {near}")
            if copies > self.devices:
                raise ValueError(f"dp={copies} needs more than {self.devices} devices: use at most {self.devices}")
        smallest = min(self.ghosts, default=self.min_ghosts or 1)
        for blocks in self.blocks:
            BlockLayout(self.width, self.width, blocks, 1)  # says which blocks divide the width
        if self.blocks:
            BlockLayout(self.width, self.width, min(self.blocks), smallest)  # says how many ghosts there may be
        elif smallest > self.width // 2:
            raise ValueError(f"ghosts={smallest} is more than a block can show: use at most {self.width // 2}")
        if self.min_ghosts and self.ghosts and max(self.ghosts) < self.min_ghosts:
            raise ValueError(f"every one of ghosts={self.ghosts} is below min_ghosts={self.min_ghosts}: raise them")

    @property
    def memory_limit(self) -> float:
        return self.memory_bytes or (1 - HEADROOM) * self.profile.memory_bytes.value

    @property
    def ghost_choices(self) -> tuple[int, ...]:
        if self.ghosts:
            return self.ghosts
        return (self.min_ghosts, 2 * self.min_ghosts, 4 * self.min_ghosts) if self.min_ghosts else DEFAULT_GHOSTS


class Setting(NamedTuple):
    """One way to run the model."""

    strategy: Strategy
    ranks: int
    dp: int
    blocks: int | None = None
    ghosts: int | None = None

    def __str__(self) -> str:
        blocks = f", {self.blocks} blocks, {self.ghosts} ghosts" if self.blocks else ""
        return f"{self.strategy} on {self.ranks} ranks{blocks}" + (f", dp {self.dp}" if self.dp > 1 else "")


@dataclass(frozen=True)
class Candidate:
    """A setting that fits, with its step. Energies are modelled; None where the profile has no watts."""

    setting: Setting
    step: StepTime
    memory_bytes: int
    parameters: int  # of the whole model
    samples: int  # of one step
    loss: str

    @property
    def devices(self) -> int:
        return self.setting.ranks * self.setting.dp

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
        return self.setting.strategy != "phantom"


class Dropped(NamedTuple):
    """A setting that was left out, and why. ``needs``: the bytes that were too many, if it was memory."""

    setting: Setting
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
    found: list[Candidate] = []
    least = float("inf")
    for _, joules, candidate in sorted(powered, key=lambda entry: entry[:2]):
        if joules < least:
            found.append(candidate)
            least = joules
    return tuple(found)


def plan(request: PlanRequest) -> Plan:
    """Time every setting. Raises if nothing fits, and says what nearly does."""
    candidates, dropped = _evaluate(request, _settings(request, _counts(request.devices)))
    if not candidates:
        raise ValueError(_nearest(request, dropped))
    return Plan(request, tuple(candidates), tuple(dropped))


def scaling(request: PlanRequest, counts: tuple[int, ...] = SCALING_COUNTS) -> dict[str, list[Candidate]]:
    """For each strategy, the best on exactly so many devices at the same batch. Counts at which none fits are left out.

    Phantom has one curve for the fewest and one for the most ghosts asked for.
    """
    most = request.profile.max_devices.value
    choices = [ghosts for ghosts in request.ghost_choices if ghosts >= (request.min_ghosts or 1)]
    ends = tuple(sorted({min(choices), max(choices)}))
    curves: dict[str, list[Candidate]] = {}
    for count in (count for count in counts if count <= most):
        at_count = replace(request, devices=max(count, *request.dp, 1), ghosts=ends)
        settings = (s for s in _settings(at_count, _counts(count)) if s.ranks * s.dp == count)
        best: dict[str, Candidate] = {}
        for candidate in _evaluate(at_count, settings)[0]:
            ghosts = candidate.setting.ghosts
            name = candidate.setting.strategy + (f", {ghosts} ghosts" if ghosts else "")
            if name not in best or rank_by(request.goal, candidate) < rank_by(request.goal, best[name]):
                best[name] = candidate
        for name, candidate in best.items():
            curves.setdefault(name, []).append(candidate)
    return curves


def _counts(devices: int) -> list[int]:
    """Numbers of ranks and of copies worth a look: powers of two, and what divides the devices."""
    powers = {2**power for power in range(devices.bit_length()) if 2**power <= devices}
    return sorted(powers | {count for count in range(1, devices + 1) if devices % count == 0})


def _settings(request: PlanRequest, counts: list[int]) -> Iterator[Setting]:
    for ranks in counts:
        for copies in request.dp or counts:
            if ranks * copies > request.devices:
                continue
            for strategy in request.strategies:
                if strategy == "phantom":
                    yield from _phantom_settings(request, ranks, copies)
                elif (strategy == "dense") == (ranks == 1):
                    yield Setting(strategy, ranks, copies)


def _phantom_settings(request: PlanRequest, ranks: int, copies: int) -> Iterator[Setting]:
    for blocks in request.blocks or ((ranks,) if ranks > 1 else ()):
        for ghosts in request.ghost_choices:
            size = request.width / blocks
            if not request.ghosts and not request.min_ghosts and ghosts >= size * (1 - 1 / blocks):
                continue  # nobody asked for these ghosts, and the dense model would be the cheaper one
            yield Setting("phantom", ranks, copies, blocks, ghosts)


def _evaluate(request: PlanRequest, settings: Iterable[Setting]) -> tuple[list[Candidate], list[Dropped]]:
    clock = Clock(request.profile, request.dtype)
    candidates, dropped = [], []
    for setting in settings:
        if reason := _impossible(request, setting):
            dropped.append(Dropped(setting, reason))
            continue
        shape = _shape(request, setting)
        needs = shape.memory.total
        if needs > request.memory_limit:
            reason = f"needs {needs / GIB:.3g} GiB a device, more than {request.memory_limit / GIB:.3g}"
            dropped.append(Dropped(setting, reason, needs))
            continue
        candidates.append(
            Candidate(setting, clock.step(shape), needs, shape.model_parameters, request.batch, _loss(request, setting))
        )
    return candidates, dropped


def _impossible(request: PlanRequest, setting: Setting) -> str | None:
    """Asked before a shape is made, since most of the grid ends here."""
    if request.width % setting.ranks:
        return f"{setting.ranks} ranks do not divide width={request.width}"
    if request.batch % setting.dp:
        return f"dp={setting.dp} does not divide batch={request.batch}"
    if setting.blocks is None or setting.ghosts is None:
        return None
    if setting.blocks % setting.ranks:
        return f"{setting.ranks} ranks do not divide blocks={setting.blocks}"
    if setting.ghosts > request.width // setting.blocks:
        return f"ghosts={setting.ghosts} is more than a block of {request.width // setting.blocks} features"
    if request.min_ghosts and setting.ghosts < request.min_ghosts:
        return f"ghosts={setting.ghosts} is below min_ghosts={request.min_ghosts}"
    return None


def _shape(request: PlanRequest, setting: Setting) -> FFNShape:
    return FFNShape(
        setting.strategy,
        request.width,
        request.depth,
        ranks=setting.ranks,
        batch=request.batch // setting.dp,
        blocks=setting.blocks,
        ghosts=setting.ghosts,
        dp=setting.dp,
        word_bytes=WORD_BYTES[request.dtype],
        activation=request.activation,
        optimizer=request.optimizer,
    )


def _loss(request: PlanRequest, setting: Setting) -> str:
    if setting.strategy != "phantom":
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
        f"nothing fits in {request.memory_limit / GIB:.3g} GiB a device: the smallest, {least.setting}, "
        f"needs {(least.needs or 0) / GIB:.3g} GiB. "
    )
    ways = [f"{count} devices" for count in _more_devices(request)]
    ways += [f"batch={batch}" for batch in _less_batch(request, least.setting)]
    if not ways:
        return message + "Neither more devices of this profile nor a smaller batch would do: give more memory"
    return message + f"It would fit with {' or with '.join(ways)}"


def _more_devices(request: PlanRequest) -> Iterator[int]:
    """The fewest devices, by doubling, on which something fits."""
    count = 2 * request.devices
    while count <= request.profile.max_devices.value:
        more = replace(request, devices=count, ghosts=(min(request.ghost_choices),))
        settings = (s for s in _settings(more, _counts(count)) if s.ranks * s.dp == count)
        if any(not _impossible(more, s) and _shape(more, s).memory.total <= request.memory_limit for s in settings):
            yield count
            return
        count *= 2


def _less_batch(request: PlanRequest, setting: Setting) -> Iterator[int]:
    """The largest batch, by halving the rows of a copy, with which this setting fits."""
    rows = request.batch // setting.dp // 2
    while rows:
        if _shape(replace(request, batch=rows * setting.dp), setting).memory.total <= request.memory_limit:
            yield rows * setting.dp
            return
        rows //= 2
