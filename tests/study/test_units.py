"""Figures as people write them."""

import pytest

from phantom_parallel.study.units import (
    format_measure,
    quantity,
)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0123, "s", "12.3 ms"),
        (9000.0, "s", "2.5 h"),
        (4_194_304, "B", "4.19 MB"),
        (999.7, "J", "1 kJ"),
        (0.153, "%", "15.3 %"),
        (0, "B", "0 B"),
        (2_100_000, "", "2,100,000"),
    ],
)
def test_quantities_have_human_units(value, unit, text):
    assert quantity(value, unit) == text


def test_values_beside_each_other_have_one_unit():
    column = [59.8, 66.4, 168.6]
    assert [quantity(value, "s", column) for value in column] == ["59.8 s", "66.4 s", "169 s"]
    joules = [1001.0, 1130.0, None]
    assert [format_measure(value, "joules", among=joules) for value in joules] == ["1 kJ", "1.13 kJ", "unavailable"]
    assert [quantity(value, "s", [0.0294, 1.42]) for value in (0.0294, 1.42)] == ["29.4 ms", "1,420 ms"]
