"""Numbers that come from files and options."""

import math


def is_finite(value: object) -> bool:
    """Whether ``value`` is an int or a float, no bool, and finite as a float: 10**400 is not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
