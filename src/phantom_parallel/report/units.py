"""Numbers as text: three significant digits, a unit and its prefix."""

import math
from collections.abc import Iterable

from phantom_parallel.study.measures import measure_unit

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


def format_measure(value: float | None, measure: str, missing: str = "unavailable") -> str:
    """A value with the unit of its measure, or ``missing``."""
    return missing if value is None or not math.isfinite(value) else quantity(value, measure_unit(measure))


def quantity(value: float, unit: str) -> str:
    """A value with a unit, as ``12.3 ms`` or ``4.1 kJ``; without a unit ``1,200,000``."""
    if unit == "%":
        return f"{100 * value:.1f} %"
    if unit == "steps":
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    if unit == "" or value == 0:
        return f"{plain(value)} {unit}".strip()
    factor, name = scale([value], unit)
    return f"{digits(value / factor)} {name}"


def scale(values: Iterable[float], unit: str) -> tuple[float, str]:
    """Divisor and name of the unit that suits the largest value."""
    largest = max((abs(value) for value in values), default=0.0)
    largest = float(f"{largest:.2e}")  # 999.96 is printed as 1000, hence as 1 k
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
    """Three significant digits, without an exponent from 0.001 to a million."""
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:.3g}"


def plain(value: float) -> str:
    """A number without a unit; integers keep all digits."""
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e15 else digits(value)


def format_ratio(value: float) -> str:
    """A ratio with two decimals, or two significant digits below 0.1."""
    return f"{value:.2f}" if 0.1 <= value < 100 else f"{value:.2g}" if value < 0.1 else f"{value:,.0f}"
