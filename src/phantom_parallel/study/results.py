"""What a comparison or a study found, as plain data: JSON on disk, and the only thing that tables and reports read.

Every figure that may be missing is None: a strategy that missed the target has no time to the loss, a machine without
counters has no measured joules.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

FORMAT, VERSION = "phantom-parallel-results", 1

T = TypeVar("T")
Status = Literal["target", "steps", "diverged"]  # of a run: the loss was reached, steps ran out, the loss is no number


@dataclass(frozen=True)
class Point:
    """A look at the held-out loss on the way. Seconds and joules are those of all steps so far."""

    step: int
    loss: float
    seconds: float
    joules: float | None


@dataclass(frozen=True)
class Run:
    """One training. ``seconds`` is its steps' time on rank 0; compute and blocked seconds are sums over all ranks."""

    strategy: str
    seed: int
    lr: float
    ranks: int
    dp: int
    status: Status
    steps: int
    loss: float | None  # held out, at the end
    seconds: float
    compute_seconds: float
    blocked_seconds: float
    joules: float | None  # of the steps, modelled
    measured_joules: float | None  # of the whole training with its evaluations, from the machine's sensors
    measured_by: str  # provenance of that figure
    curve: tuple[Point, ...] = ()

    @property
    def reached(self) -> bool:
        return self.status == "target"

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.steps

    @property
    def blocked_share(self) -> float:
        total = self.compute_seconds + self.blocked_seconds
        return self.blocked_seconds / total if total else 0.0


@dataclass(frozen=True)
class Trial:
    """One learning rate in the search of one strategy."""

    strategy: str
    lr: float
    status: Status
    steps: int
    loss: float | None
    chosen: bool = False


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its 95 % confidence interval; no interval from one value."""

    mean: float
    low: float | None
    high: float | None
    count: int


@dataclass(frozen=True)
class Ratio:
    """Of one strategy to another in one measure: the geometric mean over seeds, each seed's pair trained side by side.

    Below 1 the strategy is the cheaper one.
    """

    strategy: str
    to: str
    measure: str
    ratio: Interval


@dataclass(frozen=True)
class StrategyResult:
    """All that is known of one strategy. Counts are of one step; bytes and FLOPs are sums over all ranks, memory is one
    rank's.
    """

    strategy: str
    description: str  # "phantom, 4 blocks, 16 ghosts"
    parameters: int
    lr: float
    runs: int
    reached: int  # runs that came to the target
    flops_per_step: int
    bytes_per_step: int
    memory_bytes: int
    steps: Interval | None  # to the loss, and so on; None where no run reached it
    seconds: Interval | None
    joules: Interval | None
    measured_joules: Interval | None
    flops: Interval | None
    bytes: Interval | None
    step_seconds: Interval | None  # of every run, whether it reached the target or not
    blocked_share: Interval | None
    inference: tuple[dict[str, Any], ...] = ()  # one for each batch, as `infer.Inference.to_dict`


@dataclass(frozen=True)
class Power:
    """The watts behind modelled joules."""

    name: str
    compute_watts: float
    communication_watts: float
    idle_watts: float
    source: str


@dataclass(frozen=True)
class Comparison:
    """All that ``phantom compare`` found."""

    name: str
    command: str
    started: str  # ISO date and time, UTC
    wall_seconds: float
    settings: dict[str, Any]
    environment: dict[str, Any]
    power: Power
    target_loss: float
    target_from: str  # where the target came from, in words
    trials: tuple[Trial, ...]
    runs: tuple[Run, ...]
    strategies: tuple[StrategyResult, ...]
    ratios: tuple[Ratio, ...]
    remarks: tuple[str, ...] = ()  # what a reader must be told: targets missed, measures in which phantom is worse

    kind = "compare"


@dataclass(frozen=True)
class Cell:
    """One setting of a study. ``modelled`` ones come from the formulas and a hardware profile, others were trained or
    timed here.
    """

    name: str
    settings: dict[str, Any]  # strategy, width, depth, blocks, ghosts, ranks, dp, batch, lr, seed where they apply
    values: dict[str, float | None]  # by measure
    modelled: bool = False
    status: str = "done"
    source: str = ""  # of modelled figures


@dataclass(frozen=True)
class Study:
    """All that ``phantom study`` found for one study."""

    name: str
    question: str
    command: str
    started: str
    wall_seconds: float
    settings: dict[str, Any]
    environment: dict[str, Any]
    power: Power
    cells: tuple[Cell, ...]
    findings: tuple[str, ...] = ()  # sentences made from the cells
    remarks: tuple[str, ...] = ()

    kind = "study"


def to_json(found: Comparison | Study) -> dict[str, Any]:
    return {"format": FORMAT, "version": VERSION, "kind": found.kind} | asdict(found)


def save(found: Comparison | Study, path: Path) -> None:
    write_text(path, json.dumps(to_json(found), indent=2) + "\n")


def load(path: Path) -> Comparison | Study:
    """Read what `save` wrote; ValueError for anything else."""
    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT or data["version"] != VERSION:
            raise ValueError(f"format {data['format']!r} version {data['version']!r}, expected {FORMAT!r} {VERSION}")
        kinds: dict[str, type[Comparison] | type[Study]] = {"compare": Comparison, "study": Study}
        kind = kinds[data["kind"]]
        return from_json(kind, data)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a result of phantom compare or phantom study: {error}") from None


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(data)
            file.close()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def from_json(kind: type[T], data: Any) -> T:
    """A dataclass of this module from what ``asdict`` made of it."""
    if not isinstance(data, Mapping):
        raise TypeError(f"expected an object for {kind.__name__}, got {data!r}")
    hints = get_type_hints(kind)
    names = [one.name for one in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: _value(hints[name], data[name]) for name in names if name in data})


def _value(hint: Any, data: Any) -> Any:
    if get_origin(hint) is tuple:
        return tuple(_value(get_args(hint)[0], one) for one in data)
    if isinstance(hint, UnionType):
        return None if data is None else _value(get_args(hint)[0], data)
    return from_json(hint, data) if isinstance(hint, type) and is_dataclass(hint) else data
