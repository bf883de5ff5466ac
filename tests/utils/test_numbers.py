"""Which values are numbers."""

import pytest

from phantom_parallel.utils.numbers import is_finite


@pytest.mark.parametrize("value", [0, -1, 1.5, 1e308, 10**308])
def test_finite_numbers(value):
    assert is_finite(value)


@pytest.mark.parametrize("value", [True, None, "1", [], float("nan"), float("inf"), 10**400, -(10**400), 1j])
def test_other_values_and_integers_that_no_float_can_hold(value):
    assert not is_finite(value)
