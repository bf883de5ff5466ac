"""Documentation of fields, as help texts show it."""

import inspect
from dataclasses import dataclass

from phantom_parallel.utils.docs import field_docs


@dataclass
class Base:
    width: int = 64
    """Features of
    every layer."""

    hidden: int = 1


@dataclass
class Config(Base):
    depth: int = 2
    """Layers."""


def test_the_string_under_a_field_is_its_documentation_also_in_bases():
    assert field_docs(Config) == {"width": "Features of every layer.", "depth": "Layers."}


def test_sources_are_read_once(monkeypatch):
    before = field_docs(Config)
    monkeypatch.setattr(inspect, "getsource", None)
    assert field_docs(Config) is before
