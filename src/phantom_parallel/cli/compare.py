"""``phantom compare`` and ``phantom study``: run the settings of a file, write the report, and print the answer.

Every setting and every field of the family's training is an option, whose default is the value in the file. A setting
that the cells of a study vary takes several values.
"""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_type_hints

import tyro
from rich.console import Console

from phantom_parallel.cli import options
from phantom_parallel.cli.options import Flag, JsonOption, LaunchOptions, Tf32Option
from phantom_parallel.distributed.launch import launch_defaults
from phantom_parallel.families.registry import DEFAULT_FAMILY, get_family
from phantom_parallel.report.html import write_report
from phantom_parallel.report.tables import summary
from phantom_parallel.study.grid import run_grid
from phantom_parallel.study.results import FILE, Results, load
from phantom_parallel.study.settings import (
    SEARCH_PREFIX,
    Folder,
    SearchSettings,
    Settings,
    names_of,
    read_settings,
    training_fields,
    varied_by,
)
from phantom_parallel.utils.files import json_text
from phantom_parallel.utils.parsing import choose_from, field_docs
from phantom_parallel.utils.settings import Setting


@dataclass(frozen=True, kw_only=True)
class SettingOptions(LaunchOptions, Tf32Option, JsonOption):
    """Options of a command that runs the settings of a file."""

    folder: ClassVar[Folder]  # of the package's files
    family: ClassVar[str]
    file: ClassVar[str]  # name or path of the settings whose values are the defaults
    defaults: ClassVar[Mapping[str, Any]]
    sizes: ClassVar[Mapping[str, Any]]  # of the model that is named

    like: str | None = None
    """A well-known model, such as smollm2-135m, whose sizes but the context replace those of the file."""
    model: Path | None = None
    """The same from the config.json of a folder: a model of ours, or a Llama, Mistral or Qwen2 of Hugging Face."""
    out: Path | None = None
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
        settings = read_settings(self.folder, self.file, {**self.sizes, **changes}, self.family)
        command = "compare" if self.folder == "presets" else "study"
        out = self.out or Path(f"{command}-{settings.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}")
        with launch_defaults(device=self.device, tf32=self.tf32, announces=True):
            results = run_grid(settings, out.absolute(), resume=self.resume, show=True)
        if results is not None:
            self.show(results, out)

    def show(self, results: Results, out: Path) -> None:
        """Write the report, and print JSON, or the headline, the table and the notes that matter most."""
        page = write_report(results, out)
        if self.json:
            print(json_text(asdict(results)))
            return
        console = Console(highlight=False)
        answer, _, rest = summary(results, console.width).partition("\n\n")
        console.print(answer, markup=False, style="bold")
        console.print(f"\n{rest}", markup=False, end="")
        console.print(f"Report: {page}", markup=False, soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class CompareOptions(SettingOptions):
    """Train phantom models and others to the same held-out loss, and show time, bytes, FLOPs and joules.

    Every strategy gets the same search for a learning rate; then all are trained to the same target over several seeds,
    interleaved. Strategies that compute the same model share the losses, and the time of a step is measured for each of
    them. Options replace the values of the preset, which --help shows: phantom compare --preset digits --help. The
    ranks are started on this machine, or by torchrun or srun. Ctrl-C keeps the trainings that are finished, and
    --resume continues from there.
    """

    folder: ClassVar[Folder] = "presets"

    preset: str = ""
    """A preset of the package, or a TOML file. On emulated hosts: darcy-hosts (Darcy flow, a few minutes on 2 cores),
    darcy-wide-hosts, digits-hosts, mnist-hosts and gpt-hosts. On loopback: quick, planted, digits, standard and gpt.
    For a cluster: paper."""


@dataclass(frozen=True, kw_only=True)
class StudyOptions(SettingOptions):
    """Run a study: cells that differ in a few settings, each trained or timed.

    links: time to the loss of every strategy against the rate of the links between hosts. batch: the same against the
    batch size, on one link. epochs: the loss of batch sizes after the same epochs. ghosts: loss and cost against the
    number of ghosts. scaling: a fixed width on 1 to 8 ranks, with energy against rank-hours. weak: the same with a
    batch and data that grow with the ranks. smaller: phantom models on fewer ranks that reach the loss of a
    tensor-parallel model on more. width: the width from which phantom is faster. wider: transformers, and a wider one
    at equal energy. decode: tokens inside a host and across hosts. requests: lengths of prompts and answers, and batch
    sizes. serve: requests that arrive at random. Options replace the values of the study, and phantom study ghosts
    --help shows those of ghosts. Ctrl-C keeps the cells that are finished, and --resume continues there.
    """

    folder: ClassVar[Folder] = "studies"

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """links, batch, epochs, ghosts, scaling, weak, smaller, width, wider, decode, requests, serve, or a TOML file."""


def compare_options(family: str | None, arguments: list[str]) -> tuple[type[SettingOptions], Mapping[str, Any]]:
    """The options of a comparison, with the values of the preset in ``arguments`` as defaults."""
    preset = options.value_of("--preset", arguments) or get_family(family or DEFAULT_FAMILY).default_preset
    if preset is None:
        raise ValueError(f"there is no preset for the family {family}: give --preset and a TOML file")
    made = _with_settings(CompareOptions, preset, family, arguments)
    return made, {"preset": preset} | options.ranks_of_launcher(arguments, made.defaults["dp"])


def study_options(family: str | None, arguments: list[str]) -> tuple[type[SettingOptions], Mapping[str, Any]]:
    """The options of the study in ``arguments``, with its values as defaults."""
    known = names_of("studies")
    name = next((word for word in arguments if word in known or word.endswith(".toml")), None)
    if name is not None:
        return _with_settings(StudyOptions, name, family, arguments), {}
    words = [word for word in arguments if not word.startswith("-")]
    if words and "--help" not in arguments and "-h" not in arguments:
        raise ValueError(f"there is no {words[0]!r}: {choose_from(words[0], known)}, or give a TOML file")
    return StudyOptions, {}


def _with_settings(base: type[SettingOptions], file: str, family: str | None, arguments: list[str]) -> type[Any]:
    """The options of ``base`` and those of the settings in a file, with their values as defaults."""
    own, sizes = options.model_defaults(family, arguments)
    sizes = {name: value for name, value in sizes.items() if name in training_fields(own) and name != "context"}
    for name in ("ranks", "blocks") if sizes else ():  # those of the file may not divide the model
        sizes |= {name: int(given)} if (given := options.value_of(f"--{name}", arguments) or "").isdecimal() else {}
    settings = read_settings(base.folder, file, sizes, own if sizes else family)
    varied = varied_by(base.folder, file)
    made: dict[str, Setting] = {}

    def add(name: str, kind: Any, text: str, default: Any) -> None:
        if name in varied:
            kind, default = tuple[type(varied[name][0]), ...], varied[name]  # type: ignore[misc]
        made[name] = Setting(kind, default, text)

    def add_fields(owner: type, values: Any, prefix: str = "", without: tuple[str, ...] = ()) -> None:
        hints = get_type_hints(owner, include_extras=True)
        for name, text in field_docs(owner).items():
            if hasattr(values, name) and name not in without:
                add(name if name == "learning_rates" else prefix + name, hints[name], text, getattr(values, name))

    named = all("strategy" in cell for cell in settings.cells)
    add_fields(Settings, settings, without=("family", "strategies") if named else ("family",))
    add_fields(LaunchOptions, settings)
    add_fields(SearchSettings, settings.search, SEARCH_PREFIX)
    known, values = get_family(settings.family).train_config.settings(), settings.training
    for name in training_fields(settings.family):
        kind, default, text = known[name]
        add(name, kind, text, values.get(name, None if default is MISSING else default))
    defaults = {name: option.default for name, option in made.items()}
    own_values = {"family": settings.family, "file": file, "defaults": defaults, "sizes": sizes}
    return options.make_options(base, made, base.__doc__ or "", **own_values)
