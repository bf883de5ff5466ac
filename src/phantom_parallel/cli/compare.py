"""``phantom compare``: train every strategy to the same loss, and show what it cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from phantom_parallel.cli.options import ranks_of_launcher, value_of
from phantom_parallel.cli.setting_options import SettingOptions, with_settings
from phantom_parallel.families.registry import DEFAULT_FAMILY, get_family
from phantom_parallel.study.settings import Folder


@dataclass(frozen=True, kw_only=True)
class CompareOptions(SettingOptions):
    """Train phantom models and others to the same held-out loss, and show time, bytes, FLOPs and joules.

    Every strategy gets the same search for a learning rate; then all are trained to the same target over several seeds,
    in turns. Strategies that compute the same model share the losses, and the time of a step is measured for each of
    them. Options replace the values of the preset, which --help shows: phantom compare --preset digits --help. The
    ranks are started on this machine, or by torchrun or srun. Ctrl-C keeps the trainings that are finished, and
    --resume continues from there.
    """

    command: ClassVar[str] = "compare"
    folder: ClassVar[Folder] = "presets"

    preset: str = ""
    """A preset of the package, or a TOML file. On emulated hosts: digits-hosts (a few minutes on 2 cores), mnist-hosts
    and gpt-hosts. On loopback: quick, planted, digits, standard and gpt. For a cluster: paper."""


def options_for(family: str | None, arguments: list[str]) -> tuple[type[SettingOptions], Mapping[str, Any]]:
    """The options of a comparison, with the values of the preset in ``arguments`` as defaults.

    Args:
        family: The family that the preset must be of; any if None.
        arguments: Those of the command, not parsed yet.

    Raises:
        ValueError: If there is no such preset, or it is about another family.
    """
    preset = value_of("--preset", arguments) or get_family(family or DEFAULT_FAMILY).default_preset
    if preset is None:
        raise ValueError(f"there is no preset for the family {family}: give --preset and a TOML file")
    options = with_settings(CompareOptions, preset, family)
    return options, {"preset": preset} | ranks_of_launcher(arguments, options.defaults["dp"])
