"""Results of a comparison or a study as plain data: JSON on disk, and all that tables and reports read.

Every figure that may be missing is None: a strategy that missed the target has no time to the loss, and a machine
without counters has no measured joules.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from phantom_parallel.utils.files import read_bytes, write_json
from phantom_parallel.utils.network import Network
from phantom_parallel.utils.parsing import decode_json

FILE, FORMAT, VERSION = "results.json", "phantom-parallel-results", 1

# Target reached, steps used up, loss non-finite, or another model than the one whose losses it should share.
RunStatus = Literal["target", "steps", "diverged", "differs"]


@dataclass(frozen=True)
class CurvePoint:
    """One evaluation of the held-out loss. Seconds and joules are totals of all steps so far."""

    step: int
    loss: float
    seconds: float
    joules: float | None


@dataclass(frozen=True)
class Run:
    """One training. ``seconds`` is the time of its steps on rank 0, without evaluations; compute and blocked seconds
    are sums over all ranks.

    Where curves are shared, steps and losses are those of the training by ``trained_by``, a contender that computes the
    same model, and times and energies are ``steps`` times those of a step, of which ``timed_steps`` were timed.
    """

    strategy: str  # name of the contender: a strategy, or as in tensor+int8 or phantom@2x2
    seed: int
    lr: float
    ranks: int
    dp: int
    status: RunStatus
    steps: int
    loss: float | None  # held-out loss at the end
    seconds: float
    compute_seconds: float | None  # None where the time is not split
    blocked_seconds: float | None
    joules: float | None  # of the steps, modelled
    measured_joules: float | None  # of the whole training with its evaluations, from the machine's sensors
    measured_by: str  # provenance of that figure
    curve: tuple[CurvePoint, ...] = ()
    trained_by: str | None = None  # None: by itself
    timed_steps: int | None = None  # None: all steps

    def __post_init__(self) -> None:
        for before, after in pairwise(self.curve):
            if after.step <= before.step:
                raise ValueError(f"the steps of a curve must ascend, got {after.step} after {before.step}")

    @property
    def reached(self) -> bool:
        return self.status == "target"

    @property
    def step_seconds(self) -> float | None:
        return self.seconds / self.steps if self.steps > 0 else None

    @property
    def blocked_share(self) -> float | None:
        """Share of the ranks' time that they were blocked; None where the time is not split."""
        if self.compute_seconds is None or self.blocked_seconds is None:
            return None
        total = self.compute_seconds + self.blocked_seconds
        return self.blocked_seconds / total if total > 0 else 0.0


@dataclass(frozen=True)
class Timing:
    """Timed steps of one contender. Compute and blocked seconds, and joules, are sums over all ranks. ``steps`` is 0 if
    the loss was not finite.
    """

    strategy: str
    seed: int
    lr: float
    ranks: int
    dp: int
    steps: int
    seconds: float
    compute_seconds: float | None  # None where the time is not split
    blocked_seconds: float | None
    joules: float | None  # modelled
    measured_joules: float | None  # from the machine's sensors, with an evaluation of one batch
    measured_by: str
    losses: tuple[float, ...]  # of a few steps, on their rows and held out
    variant: str = ""  # what was chosen by the shortest step: micro-batches of a pipeline

    @property
    def step_seconds(self) -> float | None:
        return self.seconds / self.steps if self.steps else None


@dataclass(frozen=True)
class SharedModel:
    """Contenders that compute the same model, and share its search and its curves of loss against steps.

    That they do is checked on the losses of a few steps: ``differences`` has the largest relative difference of each
    one's from the medians over all of them. One whose difference is above the tolerance shares nothing, and is an
    error.
    """

    model: str
    strategies: tuple[str, ...]
    trained_by: str  # the contender with the shortest step where losses are trained
    checked_steps: int
    tolerance: float
    differences: dict[str, float | None]  # None: no finite losses

    @property
    def differing(self) -> tuple[str, ...]:
        """Contenders that do not compute the same model."""
        return tuple(
            name
            for name, difference in self.differences.items()
            if difference is None or not difference <= self.tolerance
        )


@dataclass(frozen=True)
class Trial:
    """One learning rate in the search for one contender, or for all that compute the same model."""

    strategy: str
    lr: float
    status: RunStatus
    steps: int
    loss: float | None
    chosen: bool = False


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its 95 % confidence interval; a single value has no interval.

    Intervals of means are Student's, which is symmetric: of few values that differ much it reaches below 0. Those of
    quantities that cannot be there are `clipped`.
    """

    mean: float
    low: float | None
    high: float | None
    count: int

    def clipped(self, least: float, most: float) -> "Interval":
        """The interval without what lies below ``least`` or above ``most``, which the quantity cannot be."""
        if self.low is None or self.high is None:
            return self
        return replace(self, low=max(self.low, least), high=min(self.high, most))


@dataclass(frozen=True)
class Ratio:
    """Ratio of ``strategy`` to the baseline ``to`` in one measure: the geometric mean over seeds, whose pairs were
    trained one after the other. Below 1 the strategy is cheaper.
    """

    strategy: str
    to: str
    measure: str
    ratio: Interval


@dataclass(frozen=True)
class InferenceResult:
    """Inference of one strategy with one batch size. A sample is what the family's inference produces: a row of an FFN,
    a decoded token of a transformer. Counts and energies are sums over all ranks.
    """

    batch: int
    latency_seconds: float  # median over turns
    latency_p95: float | None = None
    samples_per_second: float | None = None
    flops_per_sample: float | None = None
    bytes_per_sample: float | None = None
    joules_per_sample: float | None = None
    provenance: str = "unavailable"  # of the joules
    blocked_share: float | None = None
    parameters: int | None = None
    ranks: int | None = None
    turns: int | None = None
    prompt: int | None = None  # tokens ahead of those that are decoded
    prefill_seconds: float | None = None


@dataclass(frozen=True)
class StrategyResult:
    """Results of one strategy. Counts are per step; bytes and FLOPs are sums over all ranks, memory is one rank's."""

    strategy: str
    description: str  # "phantom, 4 blocks, 16 ghosts"
    parameters: int
    lr: float
    runs: int
    reached: int  # runs that reached the target
    flops_per_step: int
    bytes_per_step: int
    memory_bytes: int
    steps: Interval | None  # to the target loss, as the next five; None where no run reached it
    seconds: Interval | None
    joules: Interval | None
    measured_joules: Interval | None
    flops: Interval | None
    bytes: Interval | None
    step_seconds: Interval | None  # over all runs, whether they reached the target or not
    blocked_share: Interval | None
    inference: tuple[InferenceResult, ...] = ()  # one for each batch size
    ranks: int | None = None  # that share a model
    dp: int | None = None  # copies of the model
    wire: str = "full"  # format in which features travel
    variant: str = ""  # what was chosen by the shortest step: micro-batches of a pipeline
    model: str | None = None  # of those that share curves
    error: str | None = None  # why there are no figures to the loss, if something is wrong with the strategy


@dataclass(frozen=True)
class Power:
    """The watts that modelled joules are computed with, and of what they are. Ranks that share a core share its watts.

    Earlier results do not say of what: their watts are those of a rank, when the most ranks run.
    """

    name: str
    compute_watts: float
    communication_watts: float
    idle_watts: float
    source: str
    per: Literal["core", "device", "rank"] = "rank"


# What the wall clock covers: the process up to the report, or the call that trained, without imports and the report.
WallOf = Literal["process", "call"]


@dataclass(frozen=True)
class Comparison:
    """Results of ``phantom compare``."""

    name: str
    command: str
    started: str  # ISO date and time, UTC
    wall_seconds: float
    settings: dict[str, Any]
    environment: dict[str, Any]
    power: Power
    target_loss: float
    target_from: str  # origin of the target, in words
    trials: tuple[Trial, ...]
    runs: tuple[Run, ...]
    strategies: tuple[StrategyResult, ...]
    ratios: tuple[Ratio, ...]
    remarks: tuple[str, ...] = ()  # caveats for the reader: targets missed, measures in which phantom is worse
    shared: tuple[SharedModel, ...] = ()  # models whose curves are shared
    timings: tuple[Timing, ...] = ()  # from which times of a step are, where curves are shared
    findings: tuple[str, ...] = ()  # sentences on which strategy needs least
    network: Network | None = None  # emulated hosts; None for loopback, and where ranks were launched externally
    wall_of: WallOf = "call"

    kind = "compare"


SettingValue = int | float | str | bool | None


@dataclass(frozen=True)
class Cell:
    """One training or timing of a study. ``modelled`` cells come from the cost formulas and a hardware profile."""

    name: str
    settings: dict[str, SettingValue]  # strategy, sizes of the model, ranks, batch, and lr and seed where they apply
    values: dict[str, float | None]  # by measure
    modelled: bool = False
    status: str = "done"
    source: str = ""  # of modelled figures


@dataclass(frozen=True)
class Study:
    """Results of ``phantom study``."""

    name: str
    question: str
    command: str
    started: str
    wall_seconds: float
    settings: dict[str, Any]
    environment: dict[str, Any]
    power: Power
    cells: tuple[Cell, ...]
    findings: tuple[str, ...] = ()  # sentences derived from the cells
    remarks: tuple[str, ...] = ()
    network: Network | None = None  # emulated hosts of all cells
    wall_of: WallOf = "call"

    kind = "study"

    @property
    def is_regime(self) -> bool:
        """Whether it is a study of links and batch sizes."""
        return self.settings.get("measure") == "regime"


def to_json(found: Comparison | Study) -> dict[str, Any]:
    """The results as plain data."""
    return {"format": FORMAT, "version": VERSION, "kind": found.kind} | asdict(found)


def save(found: Comparison | Study, path: Path) -> None:
    """Write results atomically."""
    write_json(path, to_json(found))


@dataclass(frozen=True)
class _Header:
    format: str
    version: int
    kind: str


def load(path: Path) -> Comparison | Study:
    """Read what `save` wrote.

    Raises:
        ValueError: If the file is not readable as results.
    """
    kinds: dict[str, type[Comparison] | type[Study]] = {one.kind: one for one in (Comparison, Study)}
    try:
        text = read_bytes(path)
        header = decode_json(text, _Header, "the header")
        if (header.format, header.version) != (FORMAT, VERSION) or header.kind not in kinds:
            raise ValueError(
                f"format {header.format!r} version {header.version} kind {header.kind!r}; expected {FORMAT!r} "
                f"version {VERSION} and one of the kinds {', '.join(kinds)}"
            )
        found = decode_json(text, kinds[header.kind], header.kind)
        _check_environment(found.environment)
        if isinstance(found, Study):
            _check_cells(found)
        return found
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a result of phantom compare or phantom study: {error}") from None


def _check_environment(environment: Mapping[str, Any]) -> None:
    """Raise ValueError if a number that remarks are derived from is none."""
    for name in ("cores", "processes", "processes_per_host"):
        value = environment.get(name)  # None where it was not known
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name} of the environment must be a positive whole number, got {value!r:.50}")


def _check_cells(found: Study) -> None:
    """Raise ValueError if a cell lacks a setting that tables and figures are ordered by."""
    for index, cell in enumerate(found.cells):
        for name in ("strategy", "ranks", "batch", *(("link",) if found.is_regime else ())):
            if cell.settings.get(name) is None:
                raise ValueError(f"cell {index} ({cell.name!r}) has no setting {name!r}")
