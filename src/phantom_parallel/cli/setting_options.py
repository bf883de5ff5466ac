"""Options of ``phantom compare`` and ``phantom study``, and what both print and write.

Every setting and every field of the family's training is an option. Its help text is the documentation of that field,
and its default is the value in the file, so that ``--help`` shows what would be run. A setting that the cells of a
study vary takes several values.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, make_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_type_hints

import tyro
from rich.console import Console

from phantom_parallel.cli.options import Flag, JsonOption, LaunchOptions, NetworkOptions
from phantom_parallel.distributed.launch import launch_defaults
from phantom_parallel.families.registry import get_family
from phantom_parallel.report.html import write_report
from phantom_parallel.report.tables import terminal_table
from phantom_parallel.study.grid import run_grid
from phantom_parallel.study.notes import headline, notes
from phantom_parallel.study.results import FILE, Results, load, to_json
from phantom_parallel.study.settings import (
    SEARCH_PREFIX,
    Folder,
    SearchSettings,
    Settings,
    read_settings,
    training_fields,
    varied_by,
)
from phantom_parallel.utils.files import json_text
from phantom_parallel.utils.parsing import field_docs

MAX_NOTES = 4  # in the terminal; the report has all


@dataclass(frozen=True, kw_only=True)
class SettingOptions(LaunchOptions, JsonOption):
    """Options of a command that runs the settings of a file."""

    command: ClassVar[str]
    folder: ClassVar[Folder]  # of the package's files
    family: ClassVar[str]
    file: ClassVar[str]  # name or path of the settings whose values are the defaults
    defaults: ClassVar[Mapping[str, Any]]

    out: Annotated[Path | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Folder for the report, figures, tables and results.json; new or empty unless --resume. By default a folder named
    after the command and the time."""
    resume: Flag = False
    """Continue in --out: trainings that are finished there are not run again."""
    report_only: Flag = False
    """Run nothing: write the report in --out again from its results.json."""

    def run(self) -> None:
        """Run the settings, or read earlier results; write the report and print the results on rank 0."""
        if (self.resume or self.report_only) and self.out is None:
            raise ValueError(f"--{'resume' if self.resume else 'report-only'} needs --out, the folder to continue in")
        if self.report_only:
            assert self.out is not None
            self.show(load(self.out / FILE), self.out)
            return
        given = {name: getattr(self, name) for name in self.defaults}
        changes = {name: value for name, value in given.items() if value != self.defaults[name]}
        settings = read_settings(self.folder, self.file, changes, self.family)
        out = self.out or Path(f"{self.command}-{settings.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}")
        with launch_defaults(device=self.device, announces=True):
            results = run_grid(settings, out.absolute(), resume=self.resume, show=True)
        if results is not None:
            self.show(results, out)

    def show(self, results: Results, out: Path) -> None:
        """Write the report, and print JSON, or the headline, the table and the notes that matter most."""
        page = write_report(results, out)
        if self.json:
            print(json_text(to_json(results)))
            return
        console = Console(highlight=False)
        for sentence in headline(results):
            console.print(sentence, markup=False, style="bold")
        console.print(terminal_table(results))
        for note in notes(results)[:MAX_NOTES]:
            console.print(f"- {note}", markup=False)
        console.print(f"Report: {page}", markup=False, soft_wrap=True)


def with_settings(base: type[SettingOptions], file: str, family: str | None) -> type[SettingOptions]:
    """A subclass of ``base`` that has a field for each setting of a file.

    Args:
        base: The command's own options.
        file: Name or path of the settings, whose values become the defaults.
        family: The model family that the file must be of, if given.

    Raises:
        ValueError: If there is no such file, or it is about another family.
    """
    settings, varied = read_settings(base.folder, file, family=family), varied_by(base.folder, file)
    options: dict[str, tuple[Any, Any]] = {}
    origin = f", of the {base.folder.removesuffix('s').replace('studie', 'study')} {settings.name}"

    def add(name: str, kind: Any, text: str, default: Any, origin: str = origin) -> None:
        if name in varied:
            kind, default, origin = tuple[type(varied[name][0]), ...], varied[name], f"{origin}"  # type: ignore[misc]

        def hint(shown: str) -> str:
            return (
                f"(default: {shown}{origin})" if shown != "None" else "" if "by default" in text else "(default: none)"
            )

        options[name] = Annotated[kind, tyro.conf.arg(help=text, help_behavior_hint=hint)], default

    named = all("strategy" in cell for cell in settings.cells)
    for field in fields(Settings):
        owner = NetworkOptions if field.name in field_docs(NetworkOptions) else Settings
        if field.name in field_docs(owner) and field.name != "family" and not (named and field.name == "strategies"):
            add(field.name, _kind(owner, field.name), field_docs(owner)[field.name], getattr(settings, field.name))
    for field in fields(SearchSettings):
        name = field.name if field.name == "learning_rates" else f"{SEARCH_PREFIX}{field.name}"
        text = field_docs(SearchSettings)[field.name]
        add(name, _kind(SearchSettings, field.name), text, getattr(settings.search, field.name))
    known, given = get_family(settings.family).train_config.settings(), settings.training
    for name in training_fields(settings.family):
        kind, default, text = known[name]
        in_file = name in given or name in varied
        add(name, kind, text, given.get(name, None if default is MISSING else default), origin if in_file else "")
    defaults = {name: default for name, (_, default) in options.items()}
    return make_dataclass(
        base.__name__,
        [(name, hint, default) for name, (hint, default) in options.items()],
        bases=(base,),
        namespace={"family": settings.family, "file": file, "defaults": defaults, "__doc__": base.__doc__},
        frozen=True,
        kw_only=True,
    )


def _kind(owner: type, name: str) -> Any:
    """The annotated type of a field."""
    return get_type_hints(owner, include_extras=True)[name]
