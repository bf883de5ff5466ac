"""Options of commands that work on a model's sizes: those of the model come from its family, the rest is shared."""

from dataclasses import MISSING, dataclass, field, make_dataclass
from typing import Annotated, Any, ClassVar

import tyro

from phantom_parallel.cost.planner import Layout, ModelSizes
from phantom_parallel.families.registry import family_names, get_family
from phantom_parallel.utils.settings import Setting


def option_fields(settings: dict[str, Setting]) -> list[tuple[str, Any, Any]]:
    """Fields of a dataclass of options, one for each setting."""
    made = []
    for name, (kind, default, text) in settings.items():
        described = Annotated[kind, tyro.conf.arg(help=text)]  # type: ignore[valid-type]
        made.append((name, described, field(kw_only=True) if default is MISSING else field(default=default)))
    return made


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of a command on models of any family."""

    family: ClassVar[str]
    sizes: ClassVar[tuple[str, ...]]  # names of the options that are sizes of the model

    @property
    def model(self) -> ModelSizes:
        """The sizes of the model."""
        return ModelSizes(self.family, {name: getattr(self, name) for name in self.sizes})


def with_sizes(base: type[ModelOptions], family: str, command: str, **choices: tuple[Any, Any]) -> type[Any]:
    """The options of ``base`` with the sizes of a family's models.

    Args:
        base: The options that do not depend on the family.
        family: The family's name.
        command: The command, for the help.
        **choices: Type and default of each field of ``base`` that depends on the family.
    """
    chosen, own = get_family(family), (*Layout._fields, *base.__dataclass_fields__)
    settings = {name: setting for name, setting in chosen.shape.settings().items() if setting.doc and name not in own}
    others = ", ".join(f"phantom {command} {name} --help" for name in family_names() if name != family)
    purpose = (base.__doc__ or "").rstrip()
    return make_dataclass(
        "Options",
        [
            *option_fields(settings),
            *((name, kind, field(default=default)) for name, (kind, default) in choices.items()),
        ],
        bases=(base,),
        namespace={
            "__doc__": f"{purpose}\n\n    These are the options for {chosen.title}; for others: {others}.\n",
            "__module__": base.__module__,
            "family": family,
            "sizes": tuple(settings),
        },
        frozen=True,
        kw_only=True,
    )
