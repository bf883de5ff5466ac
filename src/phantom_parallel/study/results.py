"""Results of a comparison or a study as plain data: numbers and settings, as JSON on disk.

    Results            settings, environment, watts, target loss, trials of the search
      cells: Cell      a contender with the settings of a cell on a link; counts by the cost formulas, inference
        runs: Run      one training, or timed steps, for each seed

Every figure that may be missing is None. Means, ratios and intervals are derived, see `analysis`.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from phantom_parallel.energy import PowerProfile
from phantom_parallel.study.units import labelled
from phantom_parallel.utils.files import write_json
from phantom_parallel.utils.network import Network
from phantom_parallel.utils.parsing import decode_json

FILE, FIELDS = "results.json", "fields"  # of a folder of results

# Target reached, steps used up, loss not finite, another model than the one whose losses it should share, or steps that
# were timed without training to a loss.
RunStatus = Literal["target", "steps", "diverged", "differs", "timed"]


@dataclass(frozen=True)
class CurvePoint:
    """One evaluation of the held-out loss. Seconds and joules are totals of all steps so far."""

    step: int
    loss: float
    seconds: float
    joules: float | None


@dataclass(frozen=True)
class Run:
    """One training, or timed steps. ``seconds`` is the time of its steps on rank 0, without evaluations; compute and
    blocked seconds, and joules, are sums over all ranks.

    Where curves are shared, steps and losses are those of the training by ``trained_by``, a contender that computes the
    same model, and times and energies are ``steps`` times those of a step, of which ``timed_steps`` were timed. Where a
    training continued beyond the target, steps, seconds and joules are those to the target.
    """

    seed: int
    lr: float
    status: RunStatus
    steps: int
    loss: float | None = None  # held-out loss at the end
    seconds: float = 0.0
    compute_seconds: float | None = None  # None where the time is not split
    blocked_seconds: float | None = None
    joules: float | None = None  # modelled
    measured_joules: float | None = None  # from the machine's sensors, with evaluations
    measured_by: str = "unavailable"  # provenance of that figure
    curve: tuple[CurvePoint, ...] = ()
    losses: tuple[float, ...] = ()  # of timed steps: of a few of them, on their rows and held out
    trained_by: str | None = None  # None: by itself
    timed_steps: int | None = None  # None: all steps
    first_token_seconds: float | None = None  # of the prompt, where a step is a decoded token
    first_token_joules: float | None = None
    # By operation and bytes that rank 0 sends: how many the formulas have, and how many a decoded token had.
    exchanges: dict[str, tuple[int, int]] = field(default_factory=dict)
    # Of simulated arrivals (see `arrivals`): whole answers, first tokens, and energy with that of idle ranks.
    latency_p50: float | None = None
    latency_p95: float | None = None
    latency_p99: float | None = None
    first_token_p95: float | None = None
    idle_share: float | None = None
    served_joules_per_token: float | None = None
    loss_at_equal_steps: float | None = None  # after the steps of the reference
    loss_at_equal_energy: float | None = None  # within the modelled energy of the reference
    accuracy: float | None = None  # of held-out rows at the end, where they have classes

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
        return self.blocked_seconds / total if total > 0 else None


@dataclass(frozen=True)
class SharedModel:
    """Contenders that compute the same model, and share its search and its curves of loss against steps.

    That they do is checked on the losses of a few steps, by the largest relative difference of each one's from the
    medians over all of them. One whose difference is above the tolerance shares nothing, and is an error.
    """

    model: str
    trained_by: str  # the contender with the shortest step where losses are trained
    tolerance: float
    differences: dict[str, float | None]  # by contender; None: no finite losses

    @property
    def differing(self) -> tuple[str, ...]:
        """Contenders that do not compute the same model."""
        differences = self.differences.items()
        return tuple(name for name, value in differences if value is None or not value <= self.tolerance)


@dataclass(frozen=True)
class Trial:
    """One learning rate in the search for one model."""

    model: str
    lr: float
    status: RunStatus
    steps: int
    loss: float | None
    chosen: bool = False


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
    least_joules_per_sample: float | None = None  # of the FLOPs at the peak of the hardware profile
    mfu: float | None = None
    provenance: str = "unavailable"  # of the joules
    blocked_share: float | None = None
    parameters: int | None = None
    ranks: int | None = None
    turns: int | None = None
    prompt: int | None = None  # tokens ahead of those that are decoded
    prefill_seconds: float | None = None
    prefill_joules: float | None = None
    exchanges: dict[str, int] = field(default_factory=dict)  # of rank 0, by operation and bytes sent


@dataclass(frozen=True)
class Cell:
    """A contender with the settings of a cell on a link. Counts are per step; bytes and FLOPs are sums over all ranks,
    memory is that of the rank that needs most.
    """

    strategy: str  # name of the contender: a strategy, or as in tensor+int8 or phantom@2x2
    ranks: int  # that share a model
    dp: int  # copies of the model
    batch: int
    parameters: int
    flops_per_step: int
    bytes_per_step: int
    memory_bytes: int
    runs: tuple[Run, ...]  # one for each seed
    settings: dict[str, Any]  # that distinguish it from other cells
    link: str = "loopback"
    blocks: int | None = None
    ghosts: int | None = None
    wire: str = "full"
    variant: str = ""  # what was chosen by the shortest step: micro-batches of a pipeline
    model: str | None = None  # whose curves it shares
    least_joules_per_step: float | None = None  # of the FLOPs at the peak and watts of the hardware profile
    peak_flops: float | None = None  # FLOP/s of a rank there; None without a hardware profile
    local_batch: int | None = None  # rows of a step that a rank works on
    pp: int = 1  # stages of a pipeline, of ``ranks`` each
    new_tokens: int | None = None  # of a request, where tokens are decoded
    inference: tuple[InferenceResult, ...] = ()  # one for each batch size

    @property
    def world(self) -> int:
        """Ranks of all stages and copies."""
        return self.ranks * self.pp * self.dp

    @property
    def reached(self) -> int:
        """How many runs reached the target."""
        return sum(run.reached for run in self.runs)

    @property
    def differs(self) -> bool:
        """Whether it was seen not to compute the model that it should share."""
        return any(run.status == "differs" for run in self.runs)

    @property
    def label(self) -> str:
        return labelled(self.strategy, self.settings)


@dataclass(frozen=True)
class Results:
    """Results of ``phantom compare`` and ``phantom study``."""

    name: str
    question: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    power: PowerProfile  # the watts of a rank that modelled joules are computed with
    cells: tuple[Cell, ...]
    command: str = ""
    started: str = ""  # ISO date and time, UTC
    wall_seconds: float = 0.0
    target_loss: float | None = None  # None: trained for the same steps, or timed only
    target_from: Literal["settings", "search", "reference"] | None = None
    trials: tuple[Trial, ...] = ()
    shared: tuple[SharedModel, ...] = ()  # models whose curves are shared
    networks: dict[str, Network] | None = None  # emulated hosts by link
    no_hosts: str | None = None  # why hosts could not be emulated, where loopback took their place
    reused: int = 0  # runs that an earlier call had finished
    format: Literal["phantom-parallel-results"] = "phantom-parallel-results"
    version: Literal[1] = 1

    @property
    def is_comparison(self) -> bool:
        """Whether there is a single cell and a single link, so that contenders are all that differs."""
        return len({cell.link for cell in self.cells}) <= 1 and not any(cell.settings for cell in self.cells)

    @property
    def is_timed(self) -> bool:
        """Whether steps were timed, and no losses compared."""
        return self.settings.get("measure") in ("speed", "decode")

    @property
    def timed_measures(self) -> tuple[str, ...]:
        """What timed steps are shown by, the most important first. Where tokens are decoded, each is a step."""
        if self.settings.get("measure") == "decode":
            own = ("token_seconds", "joules_per_token", "first_token_seconds")
            if any(run.latency_p95 is not None for cell in self.cells for run in cell.runs):
                return ("latency_p95", "served_joules_per_token", "idle_share", *own)
            return (*own, "request_seconds", "joules_per_request")
        return ("step_seconds", "joules_per_sample")


def save(results: Results, path: Path) -> None:
    """Write results atomically."""
    write_json(path, asdict(results))


def load(path: Path) -> Results:
    """Read what `save` wrote; ValueError if the file is not readable as results."""
    try:
        return decode_json(path.read_bytes(), Results, "results")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a result of phantom compare or phantom study: {error}") from None
