"""Figures as text: three significant digits, a unit and its prefix; ratios with their intervals; lists of words."""

import math
from collections.abc import Iterable, Sequence

from phantom_parallel.study.measures import measure_unit
from phantom_parallel.study.results import Interval

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


def format_measure(
    value: float | None, measure: str, missing: str = "unavailable", among: Sequence[float | None] = ()
) -> str:
    """A value with the unit of its measure, or ``missing``; ``among`` as for `quantity`."""
    if value is None or not math.isfinite(value):
        return missing
    return quantity(value, measure_unit(measure), among)


def quantity(value: float, unit: str, among: Sequence[float | None] = ()) -> str:
    """A value with a unit, as ``12.3 ms`` or ``4.1 kJ``; without a unit ``1,200,000``.

    Args:
        value: The value in base units.
        unit: Its base unit.
        among: The values that it stands beside, in a column or a sentence: all of them get the same prefix, so that
            they can be compared at a glance.
    """
    if unit == "%":
        return f"{100 * value:.1f} %"
    if unit == "steps":
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    if unit == "" or value == 0:
        return f"{plain(value)} {unit}".strip()
    factor, name = scale([_middle(among) or value], unit)
    return f"{digits(value / factor)} {name}"


def _middle(values: Iterable[float | None]) -> float | None:
    """The geometric middle of the range of values, which suits small and large ones; None without positive ones."""
    found = [value for value in values if value is not None and math.isfinite(value) and value > 0]
    return math.sqrt(min(found)) * math.sqrt(max(found)) if found else None


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


def digits(value: float, significant: int = 3) -> str:
    """Three significant digits, or more, without an exponent from 0.001 to a million."""
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{significant}g}"
    rounded = float(f"{value:.{significant}g}")
    whole = abs(rounded) >= 10 ** (significant - 1)
    return f"{rounded:,.0f}" if whole else f"{rounded:,.{significant}g}"


def plain(value: float) -> str:
    """A number without a unit; integers keep all digits."""
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e15 else digits(value)


def format_ratio(value: float) -> str:
    """A ratio with two decimals, or two significant digits below 0.1."""
    return f"{value:.2f}" if 0.1 <= value < 100 else f"{value:.2g}" if value < 0.1 else f"{value:,.0f}"


def format_interval(ratio: Interval) -> str:
    """A ratio with its interval, as ``0.31 [0.28, 0.35]``."""
    if ratio.low is None or ratio.high is None:
        return format_ratio(ratio.mean)
    return f"{format_ratio(ratio.mean)} [{format_ratio(ratio.low)}, {format_ratio(ratio.high)}]"


def listed(words: Iterable[str]) -> str:
    """Words as ``a, b and c``; empty without words."""
    *first, last = list(words) or [""]
    return f"{', '.join(first)} and {last}" if first else last


def upper(text: str) -> str:
    """The text with a capital first letter."""
    return f"{text[:1].upper()}{text[1:]}"


def counted(count: int, noun: str) -> str:
    """A number of things, as ``1 rank`` or ``4 ranks``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
