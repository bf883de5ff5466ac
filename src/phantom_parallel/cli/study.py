"""``phantom study``: the paper's experiments and related ones, over ghosts, ranks, links, batch sizes and widths."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro

from phantom_parallel.cli.setting_options import SettingOptions, with_settings
from phantom_parallel.study.settings import Folder, names_of
from phantom_parallel.utils.parsing import choose_from

_FLAGS = ("--resume", "--report-only", "--json", "--help", "-h")


@dataclass(frozen=True, kw_only=True)
class StudyOptions(SettingOptions):
    """Run a study: cells that differ in a few settings, each trained or timed.

    links: time to the loss of every strategy against the rate of the links between hosts. batch: the same against the
    batch size, on one link. ghosts: loss and cost against the number of ghosts. scaling: a fixed width on 1 to 8 ranks,
    and modelled on more. smaller: phantom models on fewer ranks that reach the loss of a tensor-parallel model on more.
    width: the width from which phantom is faster. wider: transformers, and a wider one at equal energy. Options replace
    the values of the study, and phantom study ghosts --help shows those of ghosts. Ctrl-C keeps the cells that are
    finished, and --resume continues from there.
    """

    command: ClassVar[str] = "study"
    folder: ClassVar[Folder] = "studies"

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """links, batch, ghosts, scaling, smaller, width, wider, or a TOML file."""


def options_for(family: str | None, arguments: list[str]) -> tuple[type[Any], Mapping[str, Any]]:
    """The options of the study in ``arguments``, with its values as defaults."""
    name = _name_of(arguments)
    if name is None:
        words = [word for word in arguments if not word.startswith("-")]
        if words and "--help" not in arguments and "-h" not in arguments:
            known = choose_from(words[0], names_of("studies"))
            raise ValueError(f"there is no {words[0]!r}: {known}, or give a TOML file")
        return StudyOptions, {}
    return with_settings(StudyOptions, name, family), {}


def _name_of(arguments: list[str]) -> str | None:
    """The study that the arguments name, which must be known before the options can be parsed."""
    known = names_of("studies")
    for before, argument in zip(["", *arguments], arguments, strict=False):
        is_value = before.startswith("-") and "=" not in before and before not in _FLAGS
        if not is_value and (argument in known or (not argument.startswith("-") and Path(argument).is_file())):
            return argument
    return None
