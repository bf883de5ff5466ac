"""``phantom study``: sweeps over ghosts, ranks, batch sizes and widths."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro

from phantom_parallel.cli.output import output_folder, write_and_print
from phantom_parallel.cli.setting_options import SettingOptions, with_settings
from phantom_parallel.distributed.launch import launch_defaults
from phantom_parallel.families.registry import DEFAULT_FAMILY
from phantom_parallel.report.study_tables import study_table
from phantom_parallel.study.regimes import run_regime
from phantom_parallel.study.settings import RegimeSettings, StudySettings, names_of, read_study
from phantom_parallel.study.sweep import run_study
from phantom_parallel.study.unused import check_changes

_FLAGS = ("--resume", "--json", "--help", "-h")


@dataclass(frozen=True, kw_only=True)
class StudyOptions(SettingOptions):
    """Run a study: cells that differ in a few settings, each trained or timed.

    links: time to the loss of every strategy against the rate of the links between hosts. batches: the same against
    the batch size, on one link. ghosts: loss and cost against the number of ghosts. scaling: a fixed width on 1 to 8
    ranks, and modelled on more. smaller: phantom models on fewer ranks that reach the loss of a tensor-parallel model
    on more. batch: energy per sample against batch size and ranks. width: the width from which phantom is faster.
    wider: transformers, and a wider one at equal energy. Options replace the values of the study for the cells that do
    not vary them, and phantom study ghosts --help shows those of ghosts; an option that would change no cell is
    refused. Ctrl-C keeps the cells that are finished, and --resume continues from there.
    """

    noun: ClassVar[str] = "study"
    given: ClassVar[tuple[str, ...]] = ()  # settings that are on the command line, whatever their values

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """links, batches, ghosts, scaling, smaller, batch, width, wider, or a TOML file."""

    def run(self) -> None:
        """Run the study, and write and print its results on rank 0."""
        before = read_study(self.name)  # ValueError if there is no such study
        if self.name != self.file:  # the defaults are of another file, or of none
            raise ValueError(f"give the name of the study first: phantom study {self.name} ...")
        settings = read_study(self.name, self.changes())
        check_changes(before, settings, self.given, self.name)
        out = output_folder(self.out, self.resume, "study", settings.name)
        with launch_defaults(device=self.device, announces=True):
            if isinstance(settings, RegimeSettings):
                found = run_regime(settings, out.absolute(), resume=self.resume, show=True)
            else:
                found = run_study(settings, out.absolute(), resume=self.resume, show=True)
        if found is not None:
            write_and_print(found, out, study_table(found), found.findings, json=self.json)


def options_for(family: str | None, arguments: list[str]) -> tuple[type[SettingOptions], Mapping[str, Any]]:
    """The options of the study in ``arguments``, with its values as defaults; ``family`` if there is no name."""
    name = _name_of(arguments)
    settings = None if name is None else read_study(name, family=family)
    known = settings.family if settings else family or DEFAULT_FAMILY
    kind = StudySettings if settings is None else type(settings)
    options = with_settings(StudyOptions, kind, known, name, settings)
    flags = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    words = [flag.removeprefix("--").replace("-", "_") for flag in flags]
    names = [word if word in options.defaults else word.removeprefix("no_") for word in words]
    options.given = tuple(word for word in dict.fromkeys(names) if word in options.defaults)  # type: ignore[attr-defined]
    return options, {}


def _name_of(arguments: list[str]) -> str | None:
    """The study that the arguments name, which must be known before the options can be parsed."""
    known = names_of("studies")
    for before, argument in zip(["", *arguments], arguments, strict=False):
        is_value = before.startswith("-") and "=" not in before and before not in _FLAGS
        if not is_value and (argument in known or (not argument.startswith("-") and Path(argument).is_file())):
            return argument
    return None
