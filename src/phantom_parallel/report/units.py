"""Numbers as people read them: with a unit, in thousands, to three digits."""

import math
from collections.abc import Iterable

PREFIXES = (
    (1e15, "P"),
    (1e12, "T"),
    (1e9, "G"),
    (1e6, "M"),
    (1e3, "k"),
    (1.0, ""),
    (1e-3, "m"),
    (1e-6, "µ"),
    (1e-9, "n"),
)
# What a measure is called, and the unit that it is counted in.
MEASURES = {
    "loss": ("held-out loss", ""),
    "target": ("loss to reach", ""),
    "steps": ("steps", "steps"),
    "seconds": ("time", "s"),
    "step_seconds": ("step time", "s"),
    "joules": ("energy", "J"),
    "measured_joules": ("measured energy", "J"),
    "joules_per_sample": ("energy a sample", "J"),
    "bytes": ("bytes exchanged", "B"),
    "bytes_per_step": ("bytes exchanged a step", "B"),
    "flops": ("FLOPs", "FLOP"),
    "flops_per_step": ("FLOPs a step", "FLOP"),
    "parameters": ("parameters", ""),
    "memory_bytes": ("memory a rank", "B"),
    "blocked_share": ("share of time blocked", "%"),
    "reached": ("reached the loss", ""),
    "latency": ("inference latency", "s"),
    "inference_joules": ("inference energy a sample", "J"),
}
TO_THE_LOSS = ("steps", "seconds", "joules", "measured_joules", "flops", "bytes")


def measure_label(measure: str) -> str:
    """In words. ``latency, batch 64`` keeps what follows the comma."""
    name, comma, rest = measure.partition(",")
    return (MEASURES[name][0] if name in MEASURES else name.replace("_", " ")) + comma + rest


def ratio_label(measure: str) -> str:
    """The same, for what was spent on the way to the loss."""
    label = measure_label(measure)
    return f"{label} to the loss" if measure in TO_THE_LOSS else label


def measure_unit(measure: str) -> str:
    name = measure.partition(",")[0]
    return MEASURES[name][1] if name in MEASURES else ""


def shown(value: float | None, measure: str, missing: str = "unavailable") -> str:
    """A value of a measure in words, ``missing`` where there is none."""
    return missing if value is None or not math.isfinite(value) else quantity(value, measure_unit(measure))


def quantity(value: float, unit: str) -> str:
    """``12.3 ms``, ``4.1 kJ``; without a unit ``1,200,000``."""
    if unit == "%":
        return f"{100 * value:.1f} %"
    if unit == "steps":
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    if unit == "" or value == 0:
        return f"{plain(value)} {unit}".strip()
    factor, name = scale([value], unit)
    return f"{digits(value / factor)} {name}"


def scale(values: Iterable[float], unit: str) -> tuple[float, str]:
    """What to divide by, and the name of the unit then: that of the largest value."""
    largest = max((abs(value) for value in values), default=0.0)
    largest = float(f"{largest:.2e}")  # 999.96 reads 1000, and so is 1 k
    if unit == "%":
        return 0.01, "%"
    if unit == "" and largest >= 1e6:
        return 1e6, "millions"
    if unit in ("", "steps") or not largest:
        return 1.0, unit
    if unit == "s" and largest >= 120:
        return (3600.0, "h") if largest >= 7200 else (60.0, "min")
    prefixes = [one for one in PREFIXES if unit != "s" or one[0] <= 1]
    factor, prefix = next((one for one in prefixes if largest >= one[0]), PREFIXES[-1])
    return factor, prefix + unit


def digits(value: float) -> str:
    """Three of them, and never an exponent for what people count."""
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:.3g}"


def plain(value: float) -> str:
    """A number without a unit: whole ones whole."""
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e15 else digits(value)


def share(value: float) -> str:
    """A ratio: two parallel, more below 0.1."""
    return f"{value:.2f}" if 0.1 <= value < 100 else f"{value:.2g}" if value < 0.1 else f"{value:,.0f}"
