"""What is compared or studied, read from TOML: the presets that come with the package, or a user's own file."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

from phantom_parallel.families.ffn.train_config import FFNTrainConfig
from phantom_parallel.families.gpt.train_config import GPTTrainConfig
from phantom_parallel.train.config import TrainConfig
from phantom_parallel.utils.layout import positive
from phantom_parallel.utils.strategies import StrategyName as Strategy

KINDS: dict[str, type[TrainConfig]] = {"ffn": FFNTrainConfig, "gpt": GPTTrainConfig}
# Fields of a training that the comparison itself decides.
_DECIDED = frozenset({"strategy", "lr", "seed", "steps", "target_loss", "log_every", "checkpoint_every", "keep"})
OF_PHANTOM = ("blocks", "ghosts", "lr_local", "lr_compress", "lr_decompress")


def training_fields(task: Any) -> tuple[str, ...]:
    """The settings that a comparison's [training] may have."""
    if task not in KINDS:
        raise ValueError(f"task must be one of {', '.join(KINDS)}, got {task!r}")
    return tuple(one.name for one in fields(KINDS[task]) if one.name not in _DECIDED)


@dataclass(frozen=True)
class Search:
    """The search for a learning rate, the same for every strategy: the rates are tried for ``steps`` each on a seed of
    its own. While the best lies at an end of the list, the list goes on there by the same factor, ``extend`` times at
    most.
    """

    learning_rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    steps: int = 100
    seed: int = 1000
    extend: int = 2

    def __post_init__(self) -> None:
        positive(steps=self.steps)
        rates = self.learning_rates
        if not rates or any(not _number(rate) or rate <= 0 for rate in rates) or sorted(set(rates)) != list(rates):
            raise ValueError(f"learning_rates must be one or more rising numbers above 0, got {list(rates)}")
        for name in ("seed", "extend"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 0:
                raise ValueError(f"{name} must be a whole number of 0 or more, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class CompareSettings:
    """A comparison: one task, the strategies that train on it, and what they are trained to."""

    name: str
    training: dict[str, Any]  # fields of the training that all strategies share, and phantom's own
    task: str = "ffn"
    strategies: tuple[Strategy, ...] = ("phantom", "tensor", "megatron")
    target_loss: float | None = None  # None: what every strategy came down to in the search
    steps: int = 500  # at most
    seeds: int = 3
    search: Search = field(default_factory=Search)
    inference_batches: tuple[int, ...] = (1, 64)
    inference_turns: int = 20
    profile: str | None = None  # whose watts the modelled energy has; None: those that are assumed of a CPU's core

    def __post_init__(self) -> None:
        if not self.strategies or len(set(self.strategies)) != len(self.strategies):
            raise ValueError(f"strategies must be one or more, each once, got {list(self.strategies)}")
        for strategy in self.strategies:
            _check_strategy(strategy)
        positive(steps=self.steps, seeds=self.seeds, inference_turns=self.inference_turns)
        for batch in self.inference_batches:
            positive(inference_batch=batch)
        if self.profile is not None and not isinstance(self.profile, str):
            raise ValueError(f"profile must be the name of a hardware profile, got {self.profile!r}")
        for strategy in self.strategies:
            self.config(strategy, lr=self.search.learning_rates[0], seed=0, steps=max(self.steps, self.search.steps))

    def config(self, strategy: Strategy, *, lr: float, seed: int, steps: int) -> TrainConfig:
        """One training of one strategy."""
        return training_config(self.task, self.training | {"strategy": strategy}, lr, seed, steps, self.target_loss)

    @property
    def world(self) -> int:
        """Ranks that all of it needs."""
        return int(self.training.get("ranks", 1)) * int(self.training.get("dp", 1))

    def to_dict(self) -> dict[str, Any]:
        return plain(self)


def training_config(
    task: str, settings: Mapping[str, Any], lr: float, seed: int, steps: int, target_loss: float | None
) -> TrainConfig:
    """A training of one strategy from settings that may have other strategies' fields too."""
    strategy = settings.get("strategy")
    kept = {name: value for name, value in settings.items() if strategy == "phantom" or name not in OF_PHANTOM}
    every = int(settings.get("eval_every", 10))
    decided = {"lr": lr, "seed": seed, "steps": steps, "target_loss": target_loss, "eval_every": every}
    try:
        return KINDS[task](**kept | decided | {"log_every": every, "checkpoint_every": 10**9})
    except TypeError as error:
        raise ValueError(f"the settings of a training: {error}") from None


Measure = Literal["loss", "speed"]


@dataclass(frozen=True)
class StudySettings:
    """A study: cells that differ in a few settings.

    ``loss`` trains every cell, each with the same search for a learning rate, for ``steps`` or until it has the loss of
    the cells of ``reference``. ``speed`` times ``steps`` steps of every cell, in ``rounds`` rounds over all of them.
    ``modelled`` cells are worked out for a hardware profile by the formulas, and not run.
    """

    name: str
    question: str
    measure: Measure
    training: dict[str, Any]
    cells: tuple[dict[str, Any], ...]
    task: str = "ffn"
    reference: dict[str, Any] | None = None
    steps: int = 100
    at_most: int | None = None  # steps of a cell that is after the reference's loss; by default ``steps``
    stop_at_target: bool = True  # whether such a cell ends there, or goes on to ``at_most``
    seeds: int = 1
    rounds: int = 3
    search: Search = field(default_factory=Search)
    modelled: tuple[dict[str, Any], ...] = ()
    hardware: str = "frontier-mi250x"
    profile: str | None = None

    def __post_init__(self) -> None:
        if self.measure not in get_args(Measure):
            raise ValueError(f"measure must be one of {', '.join(get_args(Measure))}, got {self.measure!r}")
        positive(steps=self.steps, seeds=self.seeds, rounds=self.rounds, at_most=self.at_most or 1)
        if not self.cells:
            raise ValueError("a study needs at least one [[cells]]")
        if self.reference is not None and not any(self.refers_to(cell) for cell in self.cells):
            raise ValueError(f"no cell matches the reference {self.reference}: make one that has these settings")
        for cell in self.cells:
            _check_strategy(cell.get("strategy"))
            self.config(cell, lr=self.search.learning_rates[0], seed=0)

    def config(
        self, cell: Mapping[str, Any], *, lr: float, seed: int, steps: int | None = None, target: float | None = None
    ) -> TrainConfig:
        return training_config(self.task, self.training | dict(cell), lr, seed, steps or self.steps, target)

    def refers_to(self, cell: Mapping[str, Any]) -> bool:
        """Whether a cell is one of the reference's."""
        reference = self.reference
        return reference is not None and all(cell.get(name) == value for name, value in reference.items())

    @property
    def world(self) -> int:
        """Ranks that the largest cell needs."""
        everything = [self.training | cell for cell in self.cells]
        return max(int(one.get("ranks", 1)) * int(one.get("dp", 1)) for one in everything)

    def to_dict(self) -> dict[str, Any]:
        return plain(self)


def plain(settings: CompareSettings | StudySettings) -> dict[str, Any]:
    """As JSON has it."""
    return dict(json.loads(json.dumps(asdict(settings))))


def names_of(kind: Literal["presets", "studies"]) -> list[str]:
    """What comes with the package."""
    return sorted(Path(one.name).stem for one in _folder(kind).iterdir() if one.name.endswith(".toml"))


def read_compare(
    name_or_path: str, changes: Mapping[str, Any] | None = None, task: str | None = None
) -> CompareSettings:
    """A preset or a file, which must be of ``task`` where that is given. ``changes`` are fields to set otherwise, of
    the comparison, its training or its search.
    """
    name, data = _read("presets", name_or_path)
    if task not in (None, data.get("task", "ffn")):
        raise ValueError(f"{name_or_path} compares models of the kind {data.get('task', 'ffn')}, not {task}")
    known = training_fields(data.get("task", "ffn"))
    training, search = _table(data, "training", known), _table(data, "search", _names(Search))
    for key, value in (changes or {}).items():
        part = training if key in known else search if key in ("learning_rates",) else data
        part[key] = value
    _known(data, (*_names(CompareSettings), "training", "search"))
    settings = {"name": name} | data | {"training": training, "search": _search(search)}
    return CompareSettings(**_tuples(settings, "strategies", "inference_batches"))


def read_study(name_or_path: str, changes: Mapping[str, Any] | None = None) -> StudySettings:
    """A study of the package or of a file."""
    name, data = _read("studies", name_or_path)
    known = training_fields(data.get("task", "ffn"))
    training, search = _table(data, "training", known), _table(data, "search", _names(Search))
    for key, value in (changes or {}).items():
        (training if key in known else data)[key] = value
    _known(data, _names(StudySettings))
    for key in ("question", "measure", "cells"):
        if key not in data:
            raise ValueError(f"{name_or_path}: {key} is missing")
    cells, modelled = _spread(data.pop("cells"), known), _spread(data.pop("modelled", []), known)
    settings = {"name": name} | data | {"training": training, "search": _search(search)}
    return StudySettings(**settings | {"cells": cells, "modelled": modelled})


def _search(data: dict[str, Any]) -> Search:
    return Search(**_tuples(data, "learning_rates"))


def _folder(kind: str) -> Any:
    return files("phantom_parallel.study") / kind


def _read(kind: Literal["presets", "studies"], name_or_path: str) -> tuple[str, dict[str, Any]]:
    known = names_of(kind)
    if name_or_path in known:
        return name_or_path, tomllib.loads((_folder(kind) / f"{name_or_path}.toml").read_text())
    path = Path(name_or_path)
    if not path.exists():
        raise ValueError(f"there is no {name_or_path!r}: choose from {', '.join(known)}, or give a TOML file")
    try:
        return path.stem, tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not readable as TOML: {error}") from None


def _table(data: dict[str, Any], name: str, known: tuple[str, ...]) -> dict[str, Any]:
    found = data.pop(name, {})
    if not isinstance(found, dict):
        raise ValueError(f"[{name}] must be a table, got {found!r}")
    _known(found, known, f"[{name}] ")
    return found


def _known(data: Mapping[str, Any], known: tuple[str, ...], where: str = "") -> None:
    if unknown := sorted(data.keys() - set(known)):
        raise ValueError(f"{where}has unknown settings {', '.join(unknown)}; known are {', '.join(sorted(known))}")


def _names(kind: type) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind))


def _tuples(data: dict[str, Any], *names: str) -> dict[str, Any]:
    for name in names:
        if isinstance(data.get(name), list):
            data = data | {name: tuple(data[name])}
    return data


def _spread(cells: Any, known: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
    """Each cell once for every combination of the values that are given as lists."""
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise ValueError("cells must be tables: [[cells]]")
    spread: list[dict[str, Any]] = []
    for cell in cells:
        _known(cell, (*known, "strategy"), "[[cells]] ")
        choices = [value if isinstance(value, list) else [value] for value in cell.values()]
        spread += [dict(zip(cell, chosen, strict=True)) for chosen in product(*choices)]
    return tuple(spread)


def _check_strategy(strategy: Any) -> None:
    if strategy not in get_args(Strategy):
        raise ValueError(f"strategy must be one of {', '.join(get_args(Strategy))}, got {strategy!r}")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
