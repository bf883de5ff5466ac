"""Settings of comparisons and studies, read from TOML: the presets of the package, or a user's own file."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.resources import files
from itertools import product
from math import inf, prod
from pathlib import Path
from typing import Any, Literal, TypeVar

from phantom_parallel.families.registry import DEFAULT_FAMILY, get_family
from phantom_parallel.study.contenders import Contender, get_contender, world_size
from phantom_parallel.study.networks import NetworkSettings
from phantom_parallel.train.config import TrainConfig
from phantom_parallel.utils.files import read_text
from phantom_parallel.utils.layout import positive
from phantom_parallel.utils.network import NO_LINK
from phantom_parallel.utils.parsing import check_keys, choose_from, convert, decode_toml
from phantom_parallel.utils.strategies import get_strategy

# Fields of a training that the comparison or the study sets itself.
_SET_HERE = frozenset({"strategy", "lr", "seed", "steps", "target_loss", "log_every", "checkpoint_every", "keep"})
PHANTOM_ONLY = ("blocks", "ghosts", "lr_local", "lr_compress", "lr_decompress")
_MOST_CELLS = 10_000
SEARCH_PREFIX = "search_"  # prefix of options of the search whose names the comparison has too

Folder = Literal["presets", "studies"]


def training_fields(family: object) -> tuple[str, ...]:
    """The fields of a family's training that a file's [training] may set."""
    return tuple(one.name for one in fields(get_family(family).train_config()) if one.name not in _SET_HERE)


@dataclass(frozen=True)
class SearchSettings:
    """The search for a learning rate, the same for every strategy.

    Each rate is tried for ``steps`` steps on a seed of the search's own. While the best rate is the first or the last
    of the list, the list is extended there by the same factor, at most ``extend`` times.
    """

    learning_rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    """Learning rates to try for every strategy, in ascending order."""
    steps: int = 100
    """Steps of a trial in the search for a learning rate."""
    seed: int = 1000
    """Seed of the trials in the search for a learning rate."""
    extend: int = 2
    """How many times the learning rates may be extended beyond an end of the list."""
    micro_batches: tuple[int, ...] = ()
    """Numbers of micro-batches to try for pipelines, of which the one with the shortest step is used; by default 1, 2
    and 4 times their ranks."""
    interleave: tuple[int, ...] = ()
    """Numbers of parts of a batch that take turns, for strategies that cut layers over ranks; the one with the shortest
    step is used. If empty, that of the training."""
    wires: bool = True
    """Whether formats on the wire have a search of their own. If not, they take the learning rate that was found for
    the same strategy at full precision, where that is compared too."""

    def __post_init__(self) -> None:
        positive(steps=self.steps)
        rates = self.learning_rates
        if not rates or not all(0 < rate < inf for rate in rates) or sorted(set(rates)) != list(rates):
            raise ValueError(f"learning_rates must be one or more ascending numbers above 0, got {list(rates)}")
        for name in ("seed", "extend"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        for number in self.micro_batches:
            positive(micro_batches=number)
        for number in self.interleave:
            positive(interleave=number)


@dataclass(frozen=True)
class CompareSettings(NetworkSettings):
    """A comparison: the contenders, the training that they share, and the loss to train to."""

    name: str
    training: dict[str, Any] = field(default_factory=dict)  # fields that all contenders share, and phantom's own
    family: str = DEFAULT_FAMILY
    """Model family."""
    strategies: tuple[str, ...] = ("phantom", "tensor", "megatron")
    """What to compare: strategies, also as copies of the model (copies, phantom-copies), in a layout of ranks x copies
    (phantom@2x2), or with another format of exchanged values (tensor+int8)."""
    target_loss: float | None = None
    """Held-out loss to train to; by default the loss that every strategy reached in the search."""
    steps: int = 500
    """Maximum number of steps of a training."""
    seeds: int = 3
    """Trainings of every strategy."""
    share_curves: bool = True
    """Whether strategies that compute the same model share one search and one curve of loss against steps, and the time
    of a step is measured for each of them; otherwise each of them is trained to the loss by itself."""
    timed_steps: int = 12
    """Steps that are timed for every strategy and seed, where curves are shared."""
    timed_seconds: float = 3.0
    """Time that these steps may take: of slower steps, fewer are timed, and at least 2."""
    search: SearchSettings = field(default_factory=SearchSettings)
    inference_batches: tuple[int, ...] = (1, 64)
    """Batch sizes that inference is measured with."""
    inference_turns: int = 20
    """Timed turns of inference for every strategy and batch size."""
    profile: str | None = None
    """Hardware profile with the watts of the modelled energy (see phantom machine show); by default assumed watts of
    a CPU core."""

    def __post_init__(self) -> None:
        if not self.strategies or len(set(self.strategies)) != len(self.strategies):
            raise ValueError(f"strategies must be one or more, each once, got {list(self.strategies)}")
        positive(steps=self.steps, seeds=self.seeds, inference_turns=self.inference_turns, timed_steps=self.timed_steps)
        if not 0 < self.timed_seconds < inf:
            raise ValueError(f"timed_seconds must be a number above 0, got {self.timed_seconds}")
        for batch in self.inference_batches:
            positive(inference_batch=batch)
        for one in self.contenders:
            for variant in self.variants(one):
                self.config(variant, lr=self.search.learning_rates[0], seed=0, steps=max(self.steps, self.search.steps))
        self.check_network(self.world_size)

    @property
    def contenders(self) -> tuple[Contender, ...]:
        """What is compared, before variants are chosen."""
        among = get_family(self.family).strategies
        return tuple(get_contender(name, among, self.training) for name in self.strategies)

    def variants(self, one: Contender) -> tuple[Contender, ...]:
        """What a contender may be tuned to, of which the one with the shortest step is used: a pipeline's number of
        micro-batches, whether fsdp frees gathered weights after the forward pass, and how many parts of a batch take
        turns where ranks share layers.
        """
        if one.frees_weights is not None:
            return tuple(replace(one, frees_weights=frees) for frees in (True, False))
        if one.ranks > 1 and get_strategy(one.strategy).splits_layers and self.search.interleave:
            return tuple(replace(one, interleave=parts) for parts in self.search.interleave)
        if not one.pipelined:
            return (one,)
        numbers = self.search.micro_batches or tuple(times * one.ranks for times in (1, 2, 4))
        rows = int(self.training.get("batch", 0)) // one.dp
        fitting = [number for number in numbers if number >= one.ranks and rows % number == 0]
        return tuple(replace(one, micro_batches=number) for number in fitting or numbers)

    def config(self, one: Contender, *, lr: float, seed: int, steps: int) -> TrainConfig:
        """The training of one contender."""
        settings = self.training | one.fields(self.training)
        return training_config(self.family, settings, lr, seed, steps, self.target_loss)

    @property
    def world_size(self) -> int:
        """Ranks that the comparison needs."""
        return world_size(self.training)


StudyKind = Literal["loss", "speed"]


@dataclass(frozen=True)
class StudySettings(NetworkSettings):
    """A study: cells that differ in a few settings.

    The measure ``loss`` trains every cell, each with the same search for a learning rate, for ``steps`` or until it has
    the loss of the cells of ``reference``. The measure ``speed`` times ``steps`` steps of every cell, in ``rounds``
    rounds over all of them. ``modelled`` cells are computed for a hardware profile by the cost formulas, and not run.
    """

    name: str
    question: str
    measure: StudyKind
    cells: tuple[dict[str, Any], ...]
    training: dict[str, Any] = field(default_factory=dict)
    family: str = DEFAULT_FAMILY
    """Model family."""
    reference: dict[str, Any] | None = None
    steps: int = 100
    """Steps of a cell."""
    at_most: int | None = None
    """Maximum number of steps of a cell that is trained to the loss of the reference; by default the same as for the
    others."""
    stop_at_target: bool = True
    """Whether such a cell stops at that loss, or continues to the maximum number of steps."""
    seeds: int = 1
    """Trainings of every cell, in studies of the loss."""
    rounds: int = 3
    """Rounds over all cells, in studies of the speed."""
    search: SearchSettings = field(default_factory=SearchSettings)
    modelled: tuple[dict[str, Any], ...] = ()
    hardware: str = "frontier-mi250x"
    """Hardware profile of the modelled cells."""
    profile: str | None = None
    """Hardware profile with the watts of the modelled energy (see phantom machine show); by default assumed watts of
    a CPU core."""

    def __post_init__(self) -> None:
        positive(steps=self.steps, seeds=self.seeds, rounds=self.rounds, at_most=self.at_most or 1)
        if not self.cells:
            raise ValueError("a study needs at least one [[cells]]")
        if self.reference is not None and not any(self.is_reference(cell) for cell in self.cells):
            raise ValueError(f"no cell matches the reference {self.reference}: add one that has these settings")
        for cell in (*self.cells, *self.modelled):
            self.config(cell, lr=self.search.learning_rates[0], seed=0)
        self.check_network(self.world_size)

    def config(
        self, cell: Mapping[str, Any], *, lr: float, seed: int, steps: int | None = None, target: float | None = None
    ) -> TrainConfig:
        """The training of one cell."""
        return training_config(self.family, self.training | dict(cell), lr, seed, steps or self.steps, target)

    def is_reference(self, cell: Mapping[str, Any]) -> bool:
        """Whether a cell is one of those whose loss the others are trained to."""
        reference = self.reference
        return reference is not None and all(cell.get(name) == value for name, value in reference.items())

    @property
    def world_size(self) -> int:
        """Ranks that the largest cell needs."""
        return max(world_size(self.training | cell) for cell in self.cells)


@dataclass(frozen=True)
class RegimeSettings(CompareSettings):
    """A study of contenders at equal loss on several links and with several batch sizes.

    Losses are found once for each batch size, and the time of a step for each link.
    """

    question: str = ""
    measure: Literal["regime"] = "regime"
    links: tuple[str, ...] = ()
    """Links between the hosts to measure on, as --link has them, or loopback for ranks without hosts; by default the
    one of --link."""
    batches: tuple[int, ...] = ()
    """Batch sizes; by default that of --batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for values in (self.links, self.batches):
            if len(set(values)) != len(values):
                raise ValueError(f"links and batches must be different from each other, got {list(values)}")
        for batch in self.all_batches:
            for link in self.all_links:
                self.at(batch=batch, link=link)

    @property
    def all_links(self) -> tuple[str, ...]:
        return self.links or (self.link or NO_LINK if self.hosts is not None else LOOPBACK,)

    @property
    def all_batches(self) -> tuple[int, ...]:
        return self.batches or (self.config(self.contenders[0], lr=1.0, seed=0, steps=1).batch,)

    def at(self, *, batch: int | None = None, link: str | None = None) -> CompareSettings:
        """The comparison with a batch size, and on a link."""
        given = {one.name: getattr(self, one.name) for one in fields(CompareSettings)}
        if batch is not None:
            given["training"] = self.training | {"batch": batch}
        if link == LOOPBACK:
            given |= {"hosts": None, "link": None}
        elif link is not None:
            if self.hosts is None:
                raise ValueError(f"the link {link} is one of emulated hosts: give their number with --hosts")
            given["link"] = link
        return CompareSettings(**given)


LOOPBACK = "loopback"
Settings = CompareSettings | StudySettings
S = TypeVar("S", CompareSettings, StudySettings, RegimeSettings)


def training_config(
    family: str, settings: Mapping[str, Any], lr: float, seed: int, steps: int, target_loss: float | None
) -> TrainConfig:
    """The training of one strategy, from settings that may have fields of other strategies too."""
    strategy = get_strategy(settings.get("strategy"), get_family(family).strategies)
    others: tuple[str, ...] = () if strategy.has_blocks else PHANTOM_ONLY
    others += () if strategy.splits_depth else ("micro_batches",)
    others += () if strategy.shards_rows else ("reshard_after_forward",)
    others += () if strategy.splits_layers else ("interleave",)
    kept = {name: value for name, value in settings.items() if name not in others}
    every = settings.get("eval_every", 10)
    set_here = {"lr": lr, "seed": seed, "steps": steps, "target_loss": target_loss, "eval_every": every}
    return convert(
        kept | set_here | {"log_every": every, "checkpoint_every": 10**9},
        get_family(family).train_config(),
        f"the training of {strategy.name}",
    )


def to_dict(settings: Settings) -> dict[str, Any]:
    """Settings as plain data that JSON gives back unchanged."""
    return dict(json.loads(json.dumps(asdict(settings))))


def names_of(folder: Folder) -> list[str]:
    """Names of the package's presets or studies."""
    return sorted(Path(one.name).stem for one in _packaged(folder).iterdir() if one.name.endswith(".toml"))


def read_compare(
    name_or_path: str, changes: Mapping[str, Any] | None = None, family: str | None = None
) -> CompareSettings:
    """Read a preset of the package or a TOML file.

    Args:
        name_or_path: Name of a preset, or path of a file.
        changes: Fields to replace, of the comparison, its training and its search; those of the search but
            ``learning_rates`` have the prefix ``search_``.
        family: The model family that the file must be of, if given.
    """
    return _read(CompareSettings, "presets", name_or_path, changes or {}, family)


def read_study(
    name_or_path: str, changes: Mapping[str, Any] | None = None, family: str | None = None
) -> StudySettings | RegimeSettings:
    """Read a study of the package or a TOML file; see `read_compare`."""
    _, data = _load("studies", name_or_path)
    if data.get("measure") == "regime":
        return _read(RegimeSettings, "studies", name_or_path, changes or {}, family)
    return _read(StudySettings, "studies", name_or_path, changes or {}, family)


def _read(kind: type[S], folder: Folder, name_or_path: str, changes: Mapping[str, Any], family: str | None) -> S:
    name, data = _load(folder, name_or_path)
    if "task" in data:  # name of the key in version 1
        data["family"] = data.pop("task")
    found = data.setdefault("family", DEFAULT_FAMILY)
    if family not in (None, found):
        raise ValueError(f"{name_or_path} is about models of the family {found}, not {family}")
    config: type[TrainConfig] = get_family(found).train_config()
    training: tuple[str, ...] = training_fields(found)
    search: tuple[str, ...] = tuple(one.name for one in fields(SearchSettings))
    for part, known in (("training", training), ("search", search)):
        if not isinstance(data.setdefault(part, {}), dict):
            raise ValueError(f"{name_or_path}: [{part}] must be a table, got {data[part]!r}")
        data[part] = config.current_names(data[part]) if part == "training" else data[part]
        check_keys(data[part], known, f"{name_or_path}: [{part}]")
    for key, value in config.current_names(changes).items():
        short = key.removeprefix(SEARCH_PREFIX)
        if key in training:
            data["training"][key] = value
        elif key == "learning_rates" or (short != key and short in search):
            data["search"][short] = value
        else:
            data[key] = value
    check_keys(data, [one.name for one in fields(kind)], name_or_path)
    for part in ("cells", "modelled"):
        if part in data:
            data[part] = _expanded(data[part], part, config, ("strategy", *training), name_or_path)
    return convert({"name": name} | data, kind, name_or_path)


def _load(folder: Folder, name_or_path: str) -> tuple[str, dict[str, Any]]:
    known = names_of(folder)
    if name_or_path in known:
        return name_or_path, decode_toml((_packaged(folder) / f"{name_or_path}.toml").read_text(), name_or_path)
    path = Path(name_or_path)
    if not path.exists():
        raise ValueError(f"there is no {name_or_path!r}: {choose_from(name_or_path, known)}, or give a TOML file")
    try:
        return path.stem, decode_toml(read_text(path), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not readable as TOML: {error}") from None


def study_file(name_or_path: str) -> str:
    """The TOML file of a study."""
    packaged = name_or_path in names_of("studies")
    return str(_packaged("studies") / f"{name_or_path}.toml") if packaged else name_or_path


def _packaged(folder: Folder) -> Any:
    return files("phantom_parallel.study") / folder


def _expanded(
    cells: Any, part: str, config: type[TrainConfig], known: tuple[str, ...], source: str
) -> list[dict[str, Any]]:
    """One cell for every combination of the values that are given as lists."""
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise ValueError(f"{source}: {part} must be tables: [[{part}]]")
    expanded: list[dict[str, Any]] = []
    for cell in map(config.current_names, cells):
        check_keys(cell, known, f"{source}: [[{part}]]")
        choices = [value if isinstance(value, list) else [value] for value in cell.values()]
        if len(expanded) + prod(map(len, choices)) > _MOST_CELLS:
            raise ValueError(f"{source}: [[{part}]] have more than {_MOST_CELLS:,} combinations")
        expanded += [dict(zip(cell, chosen, strict=True)) for chosen in product(*choices)]
    return expanded
