"""Measures with their labels and units, and figures as text: three significant digits, a unit and its prefix."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Name of a measure in results, its label, and the unit of its values.
MEASURES: dict[str, tuple[str, str]] = {
    "loss": ("held-out loss", ""),
    "loss_at_equal_steps": ("loss at equal steps", ""),
    "loss_at_equal_energy": ("loss at equal modelled energy", ""),
    "accuracy": ("accuracy", "%"),
    "steps": ("steps", "steps"),
    "seconds": ("time", "s"),
    "step_seconds": ("step time", "s"),
    "token_seconds": ("time per token", "s"),
    "first_token_seconds": ("time to the first token", "s"),
    "request_seconds": ("time of a request", "s"),
    "latency_p50": ("median latency", "s"),
    "latency_p95": ("95th percentile of the latency", "s"),
    "latency_p99": ("99th percentile of the latency", "s"),
    "first_token_p95": ("95th percentile of the time to the first token", "s"),
    "idle_share": ("share of time without a request", "%"),
    "joules": ("modelled energy", "J"),
    "measured_joules": ("measured energy", "J"),
    "joules_per_sample": ("modelled energy per sample", "J"),
    "joules_per_token": ("modelled energy per token", "J"),
    "joules_per_request": ("modelled energy per request", "J"),
    "served_joules_per_token": ("modelled energy per token with idle time", "J"),
    "least_joules": ("least energy, of the FLOPs at the peak", "J"),
    "energy_gap": ("modelled energy above the least", "%"),
    "mfu": ("MFU, share of the peak FLOP/s", "%"),
    "rank_hours": ("rank-hours", ""),
    "watts_per_rank": ("modelled power per rank", "W"),
    "samples_per_rank_hour": ("samples per rank-hour", ""),
    "batch": ("global batch", ""),
    "local_batch": ("local batch", ""),
    "bytes": ("bytes exchanged", "B"),
    "bytes_per_step": ("bytes exchanged per step", "B"),
    "flops": ("FLOPs", "FLOP"),
    "flops_per_step": ("FLOPs per step", "FLOP"),
    "parameters": ("parameters", ""),
    "memory_bytes": ("memory per rank", "B"),
    "blocked_share": ("share of time blocked", "%"),
    "latency": ("inference latency", "s"),
    "inference_joules": ("inference energy per sample", "J"),
}
TO_THE_LOSS = ("steps", "seconds", "joules", "measured_joules", "least_joules", "rank_hours", "flops", "bytes")
PREFIXES = {1e15: "P", 1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k", 1.0: "", 1e-3: "m", 1e-6: "µ", 1e-9: "n"}


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its 95 % confidence interval; a single value has no interval."""

    mean: float
    low: float | None
    high: float | None
    count: int

    @property
    def includes_one(self) -> bool:
        """Whether a ratio is not significantly different from 1, or has no interval."""
        return self.low is None or self.high is None or self.low <= 1 <= self.high

    def __str__(self) -> str:
        """The mean, as `format_ratio` has it, and the interval: ``0.31 [0.28, 0.35]``."""
        if self.low is None or self.high is None:
            return format_ratio(self.mean)
        ends = ("<0.001" if end < 1e-3 else ">999" if end > 999 else format_ratio(end) for end in (self.low, self.high))
        return f"{format_ratio(self.mean)} [{', '.join(ends)}]"


def measure_label(measure: str, to_the_loss: bool = True) -> str:
    """The label of a measure, as ``time to the loss``. A suffix such as that of ``latency, batch 64`` is kept."""
    name, comma, rest = measure.partition(",")
    return MEASURES[name][0] + (" to the loss" if to_the_loss and measure in TO_THE_LOSS else comma + rest)


def measure_unit(measure: str) -> str:
    """The unit of a measure's values."""
    return MEASURES[measure.partition(",")[0]][1]


def format_measure(
    value: float | None, measure: str, missing: str = "unavailable", among: Sequence[float | None] = ()
) -> str:
    """A value with the unit of its measure, or ``missing``; ``among`` as for `quantity`."""
    if value is None or not math.isfinite(value):
        return missing
    return quantity(value, measure_unit(measure), among)


def quantity(value: float, unit: str, among: Sequence[float | None] = ()) -> str:
    """A value with a unit, as ``12.3 ms``. Those ``among`` which it stands in a column all get the same prefix."""
    if unit == "%":
        return f"{100 * value:.1f} %"
    if unit == "steps":
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    if unit == "" or value == 0:
        return f"{plain(value)} {unit}".strip()
    known = [other for other in among if other is not None and math.isfinite(other) and other > 0]
    middle = math.sqrt(min(known)) * math.sqrt(max(known)) if known else value
    middle = float(f"{abs(middle):.2e}")  # 999.96 is printed as 1000, hence as 1 k
    if unit == "s" and middle >= 120:
        factor, name = (3600.0, "h") if middle >= 7200 else (60.0, "min")
        return f"{digits(value / factor)} {name}"
    factor = next((factor for factor in PREFIXES if middle >= factor and (unit != "s" or factor <= 1)), 1e-9)
    return f"{digits(value / factor)} {PREFIXES[factor]}{unit}"


def digits(value: float) -> str:
    """Three significant digits, without an exponent from 0.001 to a million."""
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:,.3g}"


def plain(value: float) -> str:
    """A number without a unit; integers keep all digits."""
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e15 else digits(value)


def format_ratio(value: float) -> str:
    """A ratio with two decimals, or two significant digits below 0.1."""
    return f"{value:.2f}" if 0.1 <= value < 100 else f"{value:.2g}" if value < 0.1 else f"{value:,.0f}"


def tied(text: str) -> str:
    """A text with no-break spaces between numbers and units and inside intervals."""
    return re.sub(r"(?<=\d) (?=[%A-Za-zµ])|(?<=[\d.],) (?=[<>\d][^ ]*\])", "\xa0", text)


def listed(words: Iterable[str]) -> str:
    """Words as ``a, b and c``; empty without words."""
    *first, last = list(words) or [""]
    return f"{', '.join(first)} and {last}" if first else last


def counted(count: int, noun: str) -> str:
    """A number of things, as ``1 rank`` or ``4 ranks``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def labelled(name: str, settings: Mapping[str, Any]) -> str:
    """A name with settings, as ``phantom ghosts=4``."""
    return " ".join([name, *(f"{key}={value}" for key, value in settings.items())])
