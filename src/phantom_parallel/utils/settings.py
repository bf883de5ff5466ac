"""Settings: dataclass fields that are validated by their annotations, and configs that hold the config of a model.

A field's annotation states which values it may have, and the string under it what it is for, which help texts show.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from phantom_parallel.utils.layout import BlockLayout
from phantom_parallel.utils.parsing import field_docs
from phantom_parallel.utils.strategies import DEFAULT_GHOSTS, STRATEGIES, StrategyName, default_blocks


def _whole(most: int) -> Meta:
    return Meta(ge=1, le=most, description="a positive whole number")


# Sizes beyond these limits would hang: layers are built one by one, and processes are started.
PositiveInt = Annotated[int, _whole(1 << 40)]
Features = Annotated[int, _whole(1 << 24)]
Layers = Annotated[int, _whole(10_000)]
Ranks = Annotated[int, _whole(1 << 20)]
NonNegativeInt = Annotated[int, Meta(ge=0, le=1 << 40, description="a whole number of 0 or more")]
PositiveFloat = Annotated[float, Meta(gt=0, le=1e300, description="a number above 0")]
NonNegativeFloat = Annotated[float, Meta(ge=0, le=1e300, description="a number of 0 or more")]

NO_OPTION = {"option": False}  # metadata of fields that commands do not offer as options


def validate(config: Any) -> None:
    """Check each field of a dataclass against its annotation, and convert the lists and tables of a file to its type.
    A field whose default is None may be None. A ValueError names the field, what it must be, and its value.
    """
    kind: Any = type(config)
    for name, hint in _hints(kind).items():
        value = getattr(config, name)
        if is_dataclass(value):
            continue
        try:
            converted = msgspec.convert(value, hint)
        except (msgspec.ValidationError, ValueError) as error:
            limit = re.search("<= (.*)", str(error))
            expected = f"at most {limit[1]}" if limit else _expected(hint) or str(error)
            raise ValueError(f"{name} must be {expected}, got {value!r}") from None
        object.__setattr__(config, name, converted)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {
        field.name: hints[field.name] | None if field.default is None else hints[field.name]
        for field in fields(kind)
        if field.init
    }


def _expected(hint: Any) -> str | None:
    """The values of a type, in words."""
    if get_origin(hint) in (Union, UnionType):
        return _expected(next(kind for kind in get_args(hint) if kind is not type(None)))
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if get_origin(hint) is Annotated:
        return next((note.description for note in hint.__metadata__ if isinstance(note, Meta)), None)
    return {bool: "true or false", str: "a text"}.get(hint)


class Setting(NamedTuple):
    """A setting as options show it. The default is `dataclasses.MISSING` where it is required."""

    kind: Any
    default: Any
    doc: str


def settings_of(kind: type, defaults: Mapping[str, Any] | None = None) -> dict[str, Setting]:
    """The fields of a config that are options, by name, with other defaults where they are given."""
    docs, hints, settings = field_docs(kind), _hints(kind), dict[str, Setting]()
    for field in fields(kind):
        if field.init and field.metadata.get("option", True):
            default = (defaults or {}).get(field.name, field.default)
            hint = hints[field.name] | None if default is None else hints[field.name]
            settings[field.name] = Setting(hint, default, docs.get(field.name, ""))
    return settings


class HasModel:
    """A frozen dataclass that holds the config of a model as ``model``, as trainings and shapes of steps do. In options
    and files, the settings of both are one flat table.
    """

    model: Any
    model_defaults: ClassVar[Mapping[str, Any]] = {}  # of the model's settings; None if `filled` sets them

    @classmethod
    @cache
    def model_class(cls) -> type[Any] | None:
        """Class of the model's config; None if ``model`` is no config."""
        kind = get_type_hints(cls).get("model")
        return kind if isinstance(kind, type) and is_dataclass(kind) else None

    @classmethod
    def settings(cls) -> dict[str, Setting]:
        """Settings of the model and of this config, as options show them."""
        model = cls.model_class()
        if model is None:
            return settings_of(cls)
        own = {name: setting for name, setting in settings_of(cls).items() if name != "model"}
        return settings_of(model, cls.model_defaults) | own

    @classmethod
    def of(cls, **settings: Any) -> Self:
        """The config with these settings, of the model and its own."""
        return cls.from_dict(settings)

    @classmethod
    def _model_fields(cls) -> set[str]:
        model = cls.model_class()
        return set() if model is None else {field.name for field in fields(model)}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Make a config from what `to_dict` returned; ValueError if a setting is unknown, missing or wrong."""
        if not isinstance(settings, Mapping):
            raise ValueError(f"settings of {cls.__name__} must be an object, got {type(settings).__name__}")
        model, of_model = cls.model_class(), cls._model_fields()
        own = {field.name for field in fields(cls) if field.init}  # type: ignore[arg-type]
        known = own if model is None else own - {"model"} | of_model
        if unknown := sorted(settings.keys() - known):
            raise ValueError(f"unknown settings {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        try:
            settings = cls.filled({**cls.model_defaults, **settings})
            if model is None:
                return cls(**settings)
            made = model(**{name: value for name, value in settings.items() if name in of_model})
            return cls(model=made, **{name: value for name, value in settings.items() if name not in of_model})  # type: ignore[call-arg]
        except TypeError as error:
            raise ValueError(f"settings of {cls.__name__}: {error}") from None

    @classmethod
    def filled(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings with defaults that depend on other settings: the rank of a low-rank model is by default that
        with the parameters of the phantom model of the same sizes, and of these blocks and ghosts.
        """
        model, strategy = cls.model_class(), STRATEGIES.get(str(settings.get("strategy")))
        if model is None or strategy is None or not strategy.low_rank:
            return settings
        blocks, ghosts = settings.pop("blocks", None), settings.pop("ghosts", None)
        if settings.get("low_rank") is None:
            blocks, ghosts = blocks or default_blocks(settings.get("ranks", 1)), ghosts or DEFAULT_GHOSTS
            sizes = {name: settings[name] for name in cls._model_fields() & settings.keys()}
            phantom = model(**sizes | {"strategy": "phantom", "blocks": blocks, "ghosts": ghosts})
            sizes = phantom.linear_features
            weights = sum(BlockLayout(n_in, n_out, blocks, ghosts).weights for n_in, n_out in sizes)
            settings["low_rank"] = weights // sum(map(sum, sizes))
        return settings

    def to_dict(self) -> dict[str, Any]:
        """The settings of the model and of this config in one flat table."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.init}  # type: ignore[arg-type]
        return own if self.model_class() is None else asdict(own.pop("model")) | own

    def updated(self, **changes: Any) -> Self:
        """The same config with other settings, of the model or its own."""
        of_model = {name: changes.pop(name) for name in self._model_fields() & changes.keys()}
        if of_model:
            changes["model"] = replace(self.model, **of_model)
        return replace(self, **changes)  # type: ignore[type-var]

    @property
    def strategy(self) -> StrategyName:
        return self.model.strategy

    @property
    def blocks(self) -> int | None:
        return self.model.blocks

    @property
    def ghosts(self) -> int | None:
        return self.model.ghosts
