"""Settings of comparisons and studies, read from TOML: those of the package, or a user's own file.

A comparison and a study are the same grid: contenders x cells x links. Cells are settings of the training that differ;
a comparison has a single cell without any. A preset of ``phantom compare`` and a study of ``phantom study`` are files
of the same form:

    strategies = ["phantom", "tensor"]      # contenders of every cell that names none itself
    links = ["loopback", "100mbit"]         # with hosts = 4
    [training]                              # fields of the family's training that all share
    width = 1024
    [[cells]]                               # one cell for every combination of the values in lists
    batch = [32, 128]
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.resources import files
from itertools import product
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta

from phantom_parallel.families.registry import DEFAULT_FAMILY, get_family
from phantom_parallel.study.arrivals import read_trace
from phantom_parallel.study.contenders import REQUEST, Contender, get_contender, world_size
from phantom_parallel.train.config import TrainConfig
from phantom_parallel.utils.files import read_text
from phantom_parallel.utils.network import NO_LINK
from phantom_parallel.utils.parsing import check_keys, choose_from, convert, decode_toml
from phantom_parallel.utils.settings import NonNegativeInt, PositiveFloat, PositiveInt

Folder = Literal["presets", "studies"]
LOOPBACK = "loopback"  # the link of ranks without hosts
SEARCH_PREFIX = "search_"  # of options of the search, whose names the grid has too
_CELL_SETTINGS = ("strategy", "batch_per_rank", "samples_per_rank", *REQUEST)  # of cells, besides those of a training
_SET_HERE = {"strategy", "pp", "lr", "seed", "steps", "target_loss", "log_every", "checkpoint_every", "keep", "tracker"}


def training_fields(family: object) -> tuple[str, ...]:
    """The fields of a family's training that a file's [training] may set."""
    return tuple(name for name in get_family(family).train_config.settings() if name not in _SET_HERE)


@dataclass(frozen=True)
class SearchSettings:
    """The search for a learning rate, the same for every strategy.

    Each rate is tried for ``steps`` steps on a seed of the search's own. While the best rate is the first or the last
    of the list, the list is extended there by the same factor, at most ``extend`` times.
    """

    learning_rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    """Learning rates to try for every strategy, in ascending order."""
    steps: PositiveInt = 100
    """Steps of a trial in the search for a learning rate."""
    seed: NonNegativeInt = 1000
    """Seed of the trials in the search for a learning rate."""
    extend: NonNegativeInt = 2
    """How many times the learning rates may be extended beyond an end of the list."""
    micro_batches: tuple[PositiveInt, ...] = ()
    """Numbers of micro-batches to try for pipelines, of which the one with the shortest step is used; by default 1, 2
    and 4 times their stages."""
    interleave: tuple[PositiveInt, ...] = ()
    """Numbers of interleaved parts of a batch to try, for strategies that shard layers; the one with the
    shortest step is used. If empty, that of the training."""
    wires: bool = True
    """Whether formats on the wire have a search of their own. If not, they use the learning rate of the same strategy
    at full precision, where that is compared too."""

    def __post_init__(self) -> None:
        rates = self.learning_rates
        if not rates or not all(0 < rate < inf for rate in rates) or sorted(set(rates)) != list(rates):
            raise ValueError(f"learning_rates must be one or more ascending numbers above 0, got {list(rates)}")


class Decoding(NamedTuple):
    """What is decoded in a cell: the tokens of a prompt and those after it, of a batch of sequences; and how many such
    requests arrive in a second, if that is simulated.
    """

    prompt: int
    tokens: int
    batch: int
    rate: float | None = None

    @property
    def past(self) -> int:
        """Positions ahead of the token that is timed, in the middle of those that are decoded."""
        return self.prompt + (self.tokens - 2) // 2


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A grid of contenders, cells and links, and what is measured: training to a loss, or the time of steps."""

    name: str
    question: str = ""
    training: dict[str, Any] = field(default_factory=dict)  # fields that all contenders share, and phantom's own
    cells: tuple[dict[str, Any], ...] = ({},)  # settings of the training that differ, and perhaps a strategy
    reference: dict[str, Any] | None = None  # settings of the cells whose final loss the others are trained to
    family: str = DEFAULT_FAMILY
    """Model family."""
    strategies: tuple[str, ...] = ("phantom", "tensor", "megatron")
    """What to compare: strategies, also as copies of the model (copies, phantom-copies), in a layout of ranks x copies
    (phantom@2x2, dense@1x1 on one rank), or with options: another format of exchanged values (tensor+int8), and of
    transformers parallel, ladder, interleave=N, micro_batches=N and, for N stages of equally many ranks, pp=N
    (phantom+parallel+int8, megatron+pp=2); small-dense is the smallest dense model that reaches the loss."""
    measure: Literal["loss", "speed", "decode"] = "loss"
    """Whether to train to the loss, to time steps only, or to time a prompt and a token that is decoded after it."""
    target_loss: float | None = None
    """Held-out loss to train to; by default the loss that every strategy reached in the search."""
    smaller: dict[str, Any] = field(default_factory=dict)  # sizes of small-dense, found when it runs
    equal_loss: bool = True
    """Whether all are trained to the same loss; otherwise all train for the same steps, and losses are compared."""
    steps: PositiveInt = 500
    """Maximum number of steps of a training."""
    at_most: PositiveInt | None = None
    """Maximum number of steps of a cell that is trained to the loss of the reference; by default --steps."""
    stop_at_target: bool = True
    """Whether such a cell stops at that loss, or continues to the maximum number of steps."""
    rows: PositiveInt | None = None
    """Rows that every training sees, at most --steps batches of them: equal epochs of all batch sizes."""
    batch_per_rank: PositiveInt | None = None
    """Rows of a step for each rank: the batch grows with the ranks of a cell."""
    samples_per_rank: PositiveInt | None = None
    """Rows of generated data for each rank: the data grow with the ranks of a cell."""
    prompt: PositiveInt | None = None
    """Tokens ahead of those that are decoded; by default half the context."""
    new_tokens: Annotated[int, Meta(ge=2)] | None = None
    """Tokens to decode, of which the one in the middle is timed; by default as many as there is room for."""
    arrivals: PositiveFloat | None = None
    """Requests a second that arrive at random (a Poisson process), simulated with the measured times."""
    trace: str | None = None
    """A CSV file of requests to simulate instead, with the columns seconds, prompt_tokens and output_tokens."""
    requests: PositiveInt = 1000
    """Requests of --arrivals to simulate."""
    seeds: PositiveInt = 3
    """Trainings of every strategy, or rounds of timed steps."""
    share_curves: bool = True
    """Whether strategies that compute the same model share one search and one curve of loss against steps, and the time
    of a step is measured for each of them; otherwise each of them is trained to the loss by itself."""
    timed_steps: PositiveInt = 12
    """Steps that are timed for every strategy and seed."""
    timed_seconds: PositiveFloat = 3.0
    """Time that these steps may take: of slower steps, fewer are timed, and at least 2."""
    search: SearchSettings = field(default_factory=SearchSettings)
    inference_batches: tuple[PositiveInt, ...] = (1, 64)
    """Batch sizes that inference is measured with, in comparisons."""
    inference_turns: PositiveInt = 20
    """Timed turns of inference for every strategy and batch size."""
    profile: str | None = None
    """Hardware profile with the watts of the modelled energy (see phantom machine show); by default assumed watts of a
    CPU core."""
    hosts: int | None = None
    link: str | None = None
    links: tuple[str, ...] = ()
    """Links between the hosts to measure on, as --link has them, or loopback for ranks without hosts; by default the
    one of --link."""
    timeout: Annotated[float, Meta(ge=1, le=1e6)] = 60.0
    hosts_optional: bool = False
    """Whether to run on loopback, and to say so, where this system cannot emulate hosts."""

    def __post_init__(self) -> None:
        if not self.strategies or len(set(self.strategies)) != len(self.strategies):
            raise ValueError(f"strategies must be one or more, each once, got {list(self.strategies)}")
        if self.measure == "decode":
            get_family(self.family).require("text_generation")
            if trains := [each.name for each in self.contenders if each.dp * each.pp > 1 or each.rules.shards_rows]:
                raise ValueError(f"to decode, strategies must be of one copy, without pp and not fsdp, got {trains[0]}")
            for each in self.contenders:
                self.decoding(each)
            if self.trace is not None:
                read_trace(Path(self.trace))
        self.configs()
        if self.reference is not None and not any(map(self.is_reference, self.contenders)):
            raise ValueError(f"no cell matches the reference {self.reference}: add one that has these settings")
        if (smaller := next((contender for contender in self.contenders if contender.base.smaller), None)) is not None:
            get_family(self.family).smaller_models(self.config(smaller))
            if self.target_loss is None:
                raise ValueError("small-dense is the smallest dense model that reaches a loss: give target_loss")
        if len(set(self.links)) != len(self.links):
            raise ValueError(f"links must be different from each other, got {list(self.links)}")
        if len(self.links) > 1 and self.measure == "loss" and not self.share_curves:
            raise ValueError("several links need shared curves: leave out --no-share-curves")

    @property
    def all_links(self) -> tuple[str, ...]:
        """The links to measure on; `LOOPBACK` is that of ranks without hosts."""
        return self.links or (LOOPBACK if self.hosts is None else self.link or NO_LINK,)

    @property
    def contenders(self) -> tuple[Contender, ...]:
        """What is compared in all cells, before variants are chosen."""
        contenders, known = list[Contender](), get_family(self.family).strategies
        for cell in self.cells:
            own = {key: value for key, value in cell.items() if key != "strategy"}
            for key in ("batch", "samples"):
                each = own.pop(f"{key}_per_rank", getattr(self, f"{key}_per_rank"))
                if each is not None:
                    own[key] = each * world_size(self.training | own)
            for name in (cell["strategy"],) if "strategy" in cell else self.strategies:
                contender = get_contender(name, known, self.training | own, tuple(own.items()))
                contenders.append(contender.tuned_to(**self.smaller) if contender.base.smaller else contender)
        return tuple(contenders)

    @property
    def world_size(self) -> int:
        """Ranks that the largest cell needs."""
        return max(world_size(self.training | cell) for cell in self.cells)

    def is_reference(self, contender: Contender) -> bool:
        """Whether a contender is one of those whose loss the others are trained to."""
        settings = {"strategy": contender.name} | dict(contender.cell)
        return self.reference is not None and all(settings.get(key) == value for key, value in self.reference.items())

    def variants(self, contender: Contender) -> tuple[Contender, ...]:
        """What a contender may be tuned to, of which the one with the shortest step is used."""
        chosen = dict(contender.options).keys() & {"interleave", "micro_batches"}
        if self.measure == "decode" or contender.ranks * contender.pp == 1 or chosen:
            return (contender,)
        if contender.rules.shards_rows:
            return tuple(contender.tuned_to(reshard_after_forward=frees) for frees in (True, False))
        if contender.stages > 1:
            numbers = self.search.micro_batches or tuple(times * contender.stages for times in (1, 2, 4))
            rows = int((self.training | dict(contender.cell)).get("batch", 0)) // contender.dp
            fitting = [number for number in numbers if number >= contender.stages and rows % number == 0]
            return tuple(contender.tuned_to(micro_batches=number) for number in fitting or numbers)
        return tuple(contender.tuned_to(interleave=parts) for parts in self.search.interleave) or (contender,)

    def config(
        self, contender: Contender, *, lr: float = 1e-3, seed: int = 0, steps: int = 0, target: float | None = None
    ) -> TrainConfig:
        """The training of one contender, for ``steps`` or those of the settings, until ``target``."""
        training = contender.training(self.training)
        every, steps = training.get("eval_every", 10), steps or self.steps
        if self.rows is not None and "batch" in training:
            steps = min(steps, -(-self.rows // training["batch"]))
        if self.measure == "decode" and contender.rules.splits_depth:  # a training of as many micro-batches
            training["batch"] = training.get("batch", 1) * contender.ranks
        training |= {"lr": lr, "seed": seed, "steps": steps, "target_loss": target, "eval_every": every}
        try:
            own = {"log_every": every, "checkpoint_every": 10**9}
            return get_family(self.family).train_config.from_dict(training | own)
        except ValueError as error:
            raise ValueError(f"the training of {contender.base.strategy}: {error}") from None

    def decoding(self, contender: Contender) -> "Decoding":
        """What a contender decodes; ValueError if it does not fit into the context."""
        config, own = self.config(contender), dict(contender.cell)
        context: int = config.context  # type: ignore[attr-defined]
        prompt = own.get("prompt", self.prompt) or context // 2
        tokens = own.get("new_tokens", self.new_tokens) or context - prompt
        if prompt + tokens > context or tokens < 2:
            raise ValueError(f"a prompt of {prompt} tokens and {tokens} more do not fit into context={context}")
        batch = config.batch // (contender.ranks if contender.rules.splits_depth else 1)
        return Decoding(prompt, tokens, batch, own.get("arrivals", self.arrivals))

    def configs(self) -> list[TrainConfig]:
        """A training of every contender in every variant; ValueError if one is not possible."""
        contenders = [variant for contender in self.contenders for variant in self.variants(contender)]
        return [self.config(contender, target=self.target_loss) for contender in contenders]

    def to_dict(self) -> dict[str, Any]:
        """Settings as plain data that JSON gives back unchanged."""
        return dict(json.loads(json.dumps(asdict(self))))


def names_of(folder: Folder) -> list[str]:
    """Names of the package's presets or studies."""
    packaged = files("phantom_parallel.study") / folder
    return sorted(Path(file.name).stem for file in packaged.iterdir() if file.name.endswith(".toml"))


def read_settings(
    folder: Folder, name_or_path: str, changes: Mapping[str, Any] | None = None, family: str | None = None
) -> Settings:
    """Read a preset or a study of the package, or a TOML file, which must be of the ``family`` if one is given.

    ``changes`` are fields to replace, of the grid, its training and its search; those of the search but
    ``learning_rates`` have the prefix ``search_``. Several values of a setting that cells vary replace theirs.
    """
    data: dict[str, Any] = {"family": DEFAULT_FAMILY, "training": {}, "search": {}, "cells": [{}]}
    data |= _load(folder, name_or_path)
    if family not in (None, data["family"]):
        raise ValueError(f"{name_or_path} is about models of the family {data['family']}, not {family}")
    training, varied = training_fields(data["family"]), _varied(data)
    search = [field.name for field in fields(SearchSettings)]
    for key, value in (changes or {}).items():
        short = key.removeprefix(SEARCH_PREFIX)
        if key in varied:
            for table in data["cells"]:
                if isinstance(table.get(key), list):
                    table[key] = list(value)
        elif key in training:
            data["training"][key] = value
        elif key == "learning_rates" or (short != key and short in search):
            data["search"][short] = value
        else:
            data[key] = value
    check_keys(data, [field.name for field in fields(Settings)], name_or_path)
    check_keys(data["training"], training, f"{name_or_path}: [training]")
    check_keys(data["search"], search, f"{name_or_path}: [search]")
    cells = []
    for table in data["cells"]:  # one cell for every combination of the values that are given as lists
        check_keys(table, (*_CELL_SETTINGS, *training), f"{name_or_path}: [[cells]]")
        choices = [value if isinstance(value, list) else [value] for value in table.values()]
        cells += [dict(zip(table, chosen, strict=True)) for chosen in product(*choices)]
    data["cells"] = cells
    return convert(data, Settings, name_or_path)


def varied_by(folder: Folder, name_or_path: str) -> dict[str, tuple[Any, ...]]:
    """The settings that the cells of a preset or a study vary, with their values."""
    return _varied(_load(folder, name_or_path))


def _varied(data: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    varied: dict[str, list[Any]] = {}
    for table in data.get("cells", ()):
        for name, values in table.items():
            if isinstance(values, list) and name != "strategy":
                varied.setdefault(name, []).extend(values)
    return {name: tuple(dict.fromkeys(values)) for name, values in varied.items()}


def _load(folder: Folder, name_or_path: str) -> dict[str, Any]:
    """The tables of a file, with its name."""
    known, packaged = names_of(folder), files("phantom_parallel.study") / folder / f"{name_or_path}.toml"
    path = Path(str(packaged)) if name_or_path in known else Path(name_or_path)
    if not path.exists():
        raise ValueError(f"there is no {name_or_path!r}: {choose_from(name_or_path, known)}, or give a TOML file")
    try:
        data = decode_toml(read_text(path), name_or_path)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not readable as TOML: {error}") from None
    for part, kind in (("training", dict), ("search", dict), ("cells", list)):
        tables = data.get(part, kind())
        if not isinstance(tables, kind) or (kind is list and not all(isinstance(table, dict) for table in tables)):
            raise ValueError(f"{name_or_path}: {part} must be {f'[[{part}]]' if kind is list else f'[{part}]'}")
    return {"name": path.stem} | data
