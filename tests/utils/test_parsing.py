"""Plain data into dataclasses: what is accepted, and the one line that says what is wrong."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from phantom_parallel.utils.parsing import convert, decode_json, field_docs


@dataclass(frozen=True)
class Inner:
    rates: tuple[float, ...] = ()


@dataclass(frozen=True)
class Outer:
    """A class of the test."""

    size: int
    """Number of things,
    in all."""
    kind: Literal["a", "b"] = "a"
    inner: Inner = field(default_factory=Inner)
    """What is inside."""

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size must be 0 or more, got {self.size}")


@dataclass(frozen=True)
class Further(Outer):
    more: bool = False
    """Whether there is more."""


def test_nested_data_become_dataclasses():
    expected = Outer(3, "b", Inner((1.0, 0.5)))
    assert convert({"size": 3, "kind": "b", "inner": {"rates": [1, 0.5]}}, Outer, "x.toml") == expected
    assert decode_json(b'{"size": 3, "kind": "b", "inner": {"rates": [1, 0.5]}}', Outer, "x.json") == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "x.json: size"),
        ('{"size": -1}', "x.json: size must be 0 or more, got -1"),
        ('{"size": 1, "kind": "c"}', "x.json: kind: must be one of a, b, got 'c'"),
        ('{"size": 1, "inner": {"rates": [1, null]}}', "x.json: inner.rates[1]"),
        ('{"size": NaN}', "x.json: "),
    ],
)
def test_an_error_is_one_line_with_the_file_and_the_key(text, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (compared below)
        decode_json(text.encode(), Outer, "x.json")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_the_documentation_of_fields_is_that_of_the_class_and_its_bases():
    outer = {"size": "Number of things, in all.", "inner": "What is inside."}
    assert field_docs(Outer) == outer
    assert field_docs(Further) == outer | {"more": "Whether there is more."}
