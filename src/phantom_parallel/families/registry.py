"""The registry of model families. Commands, studies, storage and the planner ask it, and never ask which family it is.

A family is one folder and one line below. Families of other packages are found through the entry-point group
``phantom_parallel.families``, or are added with `register_family`.
"""

import os
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from phantom_parallel.families.base import Family

VARIABLE = "PHANTOM_FAMILIES"  # families that were registered in the process that started this one
ENTRY_POINTS = "phantom_parallel.families"
DEFAULT_FAMILY = "ffn"  # of commands without one

# Name of a family, and the module and attribute that hold its `Family`; imported when first asked for.
_FAMILIES = {
    "ffn": "phantom_parallel.families.ffn.family:FAMILY",
    "gpt": "phantom_parallel.families.gpt.family:FAMILY",
}
_FAMILIES |= dict(entry.split("=", 1) for entry in os.environ.get(VARIABLE, "").split())


def register_family(name: str, target: str) -> None:
    """Add a family. ``target`` is ``"package.module:attribute"``, so that every rank can import it by itself."""
    if _targets().get(name, target) != target:
        raise ValueError(f"the family {name!r} is registered already, as {_targets()[name]}")
    _FAMILIES[name] = target
    os.environ[VARIABLE] = " ".join(f"{name}={target}" for name, target in _FAMILIES.items())  # of ranks started later


def family_names() -> tuple[str, ...]:
    """Names of all families, the package's own first."""
    return tuple(_targets())


def get_family(name: object) -> "Family":
    """The family of that name."""
    if not isinstance(name, str) or name not in _targets():
        raise ValueError(f"the model family must be one of {', '.join(family_names())}, got {name!r}")
    return _load(_targets()[name])


def _targets() -> dict[str, str]:
    return _FAMILIES | {name: target for name, target in _installed().items() if name not in _FAMILIES}


@cache
def _installed() -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}


@cache
def _load(target: str) -> "Family":
    module, _, attribute = target.partition(":")
    return cast("Family", getattr(import_module(module), attribute))
