"""Options of commands that work on a model's sizes: those of the model come from its family, the rest is shared."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from phantom_parallel.cost.sizes import ModelSizes
from phantom_parallel.families.registry import family_names, get_family


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of a command on models of any family."""

    sizes: ClassVar[type[ModelSizes]]

    @property
    def model(self) -> ModelSizes:
        """The sizes of the model."""
        return self.sizes(**{field.name: getattr(self, field.name) for field in fields(self.sizes)})  # type: ignore[arg-type]


def with_sizes(base: type[ModelOptions], family: str, command: str, **choices: tuple[Any, Any]) -> type[Any]:
    """The options of ``base`` with the sizes of a family's models.

    Args:
        base: The options that do not depend on the family.
        family: The family's name.
        command: The command, for the help.
        **choices: Type and default of each field of ``base`` that depends on the family.
    """
    one = get_family(family)
    others = ", ".join(f"phantom {command} {name} --help" for name in family_names() if name != family)
    purpose = (base.__doc__ or "").rstrip()
    space = {
        "__doc__": f"{purpose}\n\n    These are the options for {one.title}; for others: {others}.\n",
        "__module__": base.__module__,
        "__annotations__": {name: kind for name, (kind, _) in choices.items()},
        "sizes": one.sizes(),
        **{name: default for name, (_, default) in choices.items()},
    }
    made: type[Any] = dataclass(frozen=True, kw_only=True)(type("Options", (base, one.sizes()), space))
    return made
