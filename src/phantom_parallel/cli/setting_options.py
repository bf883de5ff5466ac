"""Options of ``phantom compare`` and ``phantom study``: the settings of a file as fields of a dataclass.

Every setting and every field of the family's training is an option. Its help text is the documentation of that field,
and its default is the value in the file, so that ``--help`` shows what would be run.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_type_hints

import tyro

from phantom_parallel.cli.options import Flag, JsonOption, LaunchOptions, NetworkOptions
from phantom_parallel.families.registry import get_family
from phantom_parallel.study.settings import SEARCH_PREFIX, SearchSettings, Settings, training_fields
from phantom_parallel.utils.parsing import field_docs

_FIXED = ("family", "strategies")  # settings that are no options, or have another type as such


@dataclass(frozen=True, kw_only=True)
class SettingOptions(LaunchOptions, JsonOption):
    """Options of a command that runs the settings of a file."""

    noun: ClassVar[str]  # for the file of settings: preset, study
    family: ClassVar[str]
    file: ClassVar[str | None]  # name or path of the settings whose values are the defaults
    defaults: ClassVar[Mapping[str, Any]]

    out: Annotated[Path | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Folder for the report, figures, tables and results.json; new or empty unless --resume. By default a folder named
    after the command and the time."""
    resume: Flag = False
    """Continue in --out: trainings that are finished there are not run again."""

    def changes(self) -> dict[str, Any]:
        """The settings that differ from those of the file."""
        given = {name: getattr(self, name) for name in self.defaults}
        return {name: value for name, value in given.items() if value != self.defaults[name]}


def with_settings(
    base: type[SettingOptions], kind: type[Settings], family: str, file: str | None, settings: Settings | None
) -> type[SettingOptions]:
    """A subclass of ``base`` that has a field for each setting.

    Args:
        base: The command's own options.
        kind: The class of the settings.
        family: The model family, whose training has further fields.
        file: Name or path of the settings.
        settings: The settings of the file, which become the defaults; those of the classes if None.
    """
    options: dict[str, tuple[Any, Any]] = {}
    origin = "" if settings is None else f", of the {base.noun} {settings.name}"

    def add(name: str, owner: type, field_name: str, default: Any, origin: str) -> None:
        known = get_type_hints(owner, include_extras=True)[field_name]
        options[name] = Annotated[known, _argument(owner, field_name, origin)], default

    if file is not None and base.noun in field_docs(base):
        options[base.noun] = Annotated[str, tyro.conf.arg(help=field_docs(base)[base.noun])], file
    if "strategies" in field_docs(kind):
        argument = _argument(kind, "strategies", origin, name="strategy", aliases=["--strategies"])
        options["strategies"] = Annotated[tuple[str, ...], argument], getattr(settings, "strategies", ())
    for one in fields(kind):
        if one.name in field_docs(kind) and one.name not in _FIXED:
            add(one.name, kind, one.name, getattr(settings, one.name, one.default), origin)
    for one in fields(NetworkOptions):
        if one.name in {setting.name for setting in fields(kind)}:
            add(one.name, NetworkOptions, one.name, getattr(settings, one.name, one.default), origin)
    search = getattr(settings, "search", SearchSettings())
    for one in fields(SearchSettings):
        name = one.name if one.name == "learning_rates" else f"{SEARCH_PREFIX}{one.name}"
        add(name, SearchSettings, one.name, getattr(search, one.name), origin)
    config, given = get_family(family).train_config(), getattr(settings, "training", {})
    known = {one.name: one.default for one in fields(config) if one.default is not MISSING}
    for name in training_fields(family):
        add(name, config, name, given.get(name, known.get(name)), origin if name in given else "")
    return make_dataclass(
        base.__name__,
        [(name, hint, default) for name, (hint, default) in options.items()],
        bases=(base,),
        namespace={
            "family": family,
            "file": file,
            "defaults": {name: default for name, (_, default) in options.items() if name != base.noun},
            "__doc__": base.__doc__,
        },
        frozen=True,
        kw_only=True,
    )


def _argument(owner: type, field_name: str, origin: str, **more: Any) -> object:
    """The help of an option: the documentation of a field, the default, and the origin of the default."""
    text = field_docs(owner)[field_name]

    def hint(default: str) -> str:
        if default != "None":
            return f"(default: {default}{origin})"
        return "" if "by default" in text else "(default: none)"

    return tyro.conf.arg(help=text, help_behavior_hint=hint, **more)
