"""``phantom tune``: the blocks and ghosts that reach the dense loss at the least time or energy on a machine.

What a phantom model computes depends on its blocks and ghosts and not on ranks, so that trainings in one process tell
how many steps it needs to a loss, and the planner what a step costs on the target machine.

candidates  blocks and ghosts whose best layout on the machine has a cheaper step than the best one of the dense model
dense       a search for the learning rate, and a training for each seed; their loss is the target unless one is given.
            With --parallel-block both, it is trained with these blocks too, and the cheaper of the two is the baseline
rungs       every candidate has the same search in short trainings. The half with the least estimated cost to the loss
            is trained twice as long, and so on: at equal loss, its steps over those of the dense model, times its step
finals      the best are trained to the target, once for each seed; and, if time is left, the smallest dense model too
sizes       with several sizes below the model's, all this at each of them, from the second on with the best of the
            first alone; and the trend of the steps over sizes, where it is certain enough, gives those of the model
"""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from itertools import product
from math import exp, inf, log, sqrt
from pathlib import Path
from statistics import fmean, geometric_mean, pvariance
from typing import Any, ClassVar, Literal

import torch
from rich.console import Console
from rich.table import Table
from scipy import stats

from phantom_parallel.cli.options import Flag, JsonOption, Tf32Option, make_options, make_table, other_families
from phantom_parallel.cost.hardware import load_profile
from phantom_parallel.cost.planner import Candidate, Layout, ModelSizes, PlanRequest, plan, planned_strategies, rank_by
from phantom_parallel.cost.terms import optimizer_of
from phantom_parallel.distributed.launch import launch, launch_defaults
from phantom_parallel.families.registry import DEFAULT_FAMILY, get_family
from phantom_parallel.report.html import write_tuning
from phantom_parallel.study.analysis import ratio_interval
from phantom_parallel.study.contenders import SMALL_DENSE, Contender, Pairs
from phantom_parallel.study.grid import find_smaller, in_turn, search, to_target
from phantom_parallel.study.results import Run
from phantom_parallel.study.runner import RunOptions, cell_runner, prepare_folder
from phantom_parallel.study.settings import SearchSettings, Settings, training_fields
from phantom_parallel.study.units import Interval, counted, format_ratio, listed, quantity
from phantom_parallel.train.config import TrainConfig
from phantom_parallel.utils.files import FolderLock, json_text, write_json
from phantom_parallel.utils.settings import Setting
from phantom_parallel.utils.strategies import PLANNED, WireFormat, wire_suffix

Train = Callable[[str, TrainConfig], Run]  # the training of a name

RESULT = "tune.json"
FINALISTS = 3
LARGEST_CHANGE = 1.25  # of the ratio of steps, by the interval of its trend, up to a size that it is extrapolated to
AT_MOST = 3  # times the dense model's steps that a phantom model is trained for
# Parts of the budget: for the dense model's seeds, for searches of phantom models, and up to the last rung.
_DENSE_SHARE, _SEARCH_SHARE, _RUNGS_SHARE = 0.25, 0.3, 0.6
_PARALLEL = "parallel_block"
_AS_MANY = Interval(1.0, None, None, 1)  # steps relative to the dense model, where the cost of one is compared
_HELP = """Find the blocks and ghosts with which {title} reach the dense model's loss at the least time or energy on a
machine, or that phantom does not pay there. Other families: {others}.

What a phantom model computes depends on blocks and ghosts and not on ranks: steps to the loss are measured here, in one
process, and the step's time and energy are modelled for the machine, as phantom plan does. The candidates are halved
again and again, and the last ones trained with several seeds. Ctrl-C keeps the trainings that are finished, and
--resume continues from there.
"""
# Settings of a training that belong to a layout, or that the command chooses itself.
_HIDDEN = (
    *("ranks", "dp", "wire", "blocks", "ghosts", "low_rank", "micro_batches", "reshard_after_forward", "interleave"),
    *("fsdp", "compile", "gradient_accumulation_steps", "eval_every"),
)


@dataclass(frozen=True, kw_only=True)
class TuneOptions(Tf32Option, JsonOption):
    """Options of every family; the others are the settings of its training."""

    family: ClassVar[str]
    training: ClassVar[dict[str, Any]]  # defaults of the settings of the training
    size: ClassVar[str]  # the size of a model that trends are over; empty if none

    hardware: str | None = None
    """The target machine: a hardware profile's name, or the path of a .toml file; by default this machine with
    --devices or 2 ranks, as phantom machine measure wrote it."""
    devices: int | None = None
    """The most devices of the target to use; by default those of a node."""
    goal: Literal["time", "energy"] = "time"
    """What the recommended model needs the least of to the loss."""
    steps: int = 400
    """Steps of the dense model. A phantom model is trained for three times as many at most."""
    target_loss: float | None = None
    """Held-out loss to train to; by default that of the dense model after --steps."""
    minutes: float = 20.0
    """About how long the measurements may take."""
    blocks: tuple[int, ...] = ()
    """Numbers of blocks to try; by default powers of two up to 16 and to the devices."""
    ghosts: tuple[int, ...] = (4, 16, 64)
    """Numbers of ghosts to try."""
    wire: tuple[WireFormat, ...] = ("full",)
    """Formats in which features may travel on the target, for phantom and the dense model alike; each gets its best.
    In one process nothing travels: steps are those of full precision."""
    learning_rates: tuple[float, ...] = SearchSettings().learning_rates
    """Learning rates to try for every model, in ascending order."""
    seeds: int = 3
    """Trainings of the dense model and of the last candidates."""
    eval_every: int = 10
    """Steps between evaluations of the held-out loss, which is how finely steps to the loss are known."""
    device: str = "auto"
    """Device that trainings run on: cpu, cuda, xpu, ..."""
    out: Path | None = None
    """Folder for finished trainings and the result; new or empty unless --resume. By default a folder named after the
    command and the time."""
    resume: Flag = False
    """Continue in --out: trainings that are finished there are not run again."""

    def run(self) -> None:
        if self.resume and self.out is None:
            raise ValueError("--resume needs --out, the folder to continue in")
        profile = load_profile(self.hardware or f"this-machine-{self.devices or 2}")
        devices = self.devices or int(profile.devices_per_node.value)
        training = {name: getattr(self, name) for name in self.training} | {"eval_every": self.eval_every}
        search = SearchSettings(self.learning_rates, steps=max(1, self.steps // 4, training.get("warmup", 0) + 1))
        block = getattr(self, _PARALLEL, None)  # of families that have it
        training |= {} if block is None else {_PARALLEL: block == "yes"}
        run: Any = {name: getattr(self, name) for name in ("family", "steps", "target_loss", "seeds")}
        settings = Settings(name="tune", training=training, strategies=("dense",), search=search, **run)
        config = settings.configs()[0]
        left_out = (*Layout._fields, "low_rank")
        own = {name: value for name, value in asdict(config.model).items() if name not in left_out}
        model = ModelSizes(config.family, own | {"optimizer": optimizer_of(config.optimizer, config.momentum)})
        kind: Any = {"batch": config.batch, "dtype": config.dtype, "devices": devices, "goal": self.goal, "pp": (1,)}
        kind |= {"strategy": planned_strategies(config.family)[0]}  # that can be trained
        request = PlanRequest(model=model, profile=profile, **kind)
        blocks = self.blocks or tuple(count for count in (2, 4, 8, 16) if count <= max(2, devices))
        sizes = tuple(sorted(set(getattr(self, f"{self.size}s")))) if self.size else ()
        if sizes and (len(sizes) < 2 or sizes[-1] >= training[self.size]):
            given, target = " ".join(map(str, sizes)), f"--{self.size} {training[self.size]}"
            raise ValueError(f"--{self.size}s needs at least two sizes below {target}, got {given}")
        if sizes and block == "both":
            raise ValueError(f"--{self.size}s extrapolates one model: give --parallel-block yes or no")
        out = self.out or Path(f"tune-{self.family}-{datetime.now(UTC):%Y%m%d-%H%M%S}")
        options = RunOptions(out.absolute(), self.resume, show=True)
        with launch_defaults(device=self.device, tf32=self.tf32, announces=True):
            grid = product((False, True) if block == "both" else (False,), blocks, self.ghosts)
            place = (self.size, sizes, self.wire)
            result = tune(settings, request, grid, options, self.minutes, *place)
        command = _command(result, self)
        data = {"verdict": result.verdict, "pays": result.pays, "command": command} | result.to_dict()
        write_json(out / RESULT, data)
        page = write_tuning(data, out)
        if self.json:
            print(json_text(data))
            return
        console = Console(highlight=False)
        console.print(result.verdict, markup=False, style="bold")
        for part in (*_table(result), *(_trend_table(result) if result.trends else ())):
            console.print(part)
        console.print(f"Train {'it' if result.winner else 'the dense model'} with:", markup=False)
        console.print(command, markup=False, soft_wrap=True)
        console.print(f"Report: {page}", markup=False, soft_wrap=True)


def options_for(family: str | None, arguments: list[str]) -> tuple[type[Any], dict[str, Any]]:
    """The options for models of a family."""
    family = family or DEFAULT_FAMILY
    known = get_family(family).train_config.settings()
    settings = {name: known[name] for name in training_fields(family) if name not in _HIDDEN}
    text = _HELP.format(title=get_family(family).title, others=other_families("tune", family))
    defaults = {name: setting.default for name, setting in settings.items() if name != _PARALLEL}
    if _PARALLEL in settings:
        doc = "Attention and SwiGLU side by side after one norm: another function, with half the exchanges of a layer. "
        doc += "With both, phantom and the dense model each get what reaches the loss at the least cost."
        settings[_PARALLEL] = Setting(Literal["no", "yes", "both"], "no", doc)
    size = next((name for name in ("width", "dim") if name in settings), "")
    if size:
        doc = f"Measure at these sizes in place of --{size}, and extrapolate the steps where their trend allows it."
        settings[f"{size}s"] = Setting(tuple[int, ...], (), doc)
    return make_options(TuneOptions, settings, text, family=family, training=defaults, size=size), {}


@dataclass(frozen=True)
class Tuned:
    """A phantom model: its steps to the loss and its cost there, relative to the dense model in its best layout."""

    layout: Candidate  # the best on the machine
    dense: Candidate
    goal: str
    steps: Interval | None  # over seeds; without an interval where it is an estimate or there is one seed
    estimated: bool = True  # whether the steps are those to the loss of a short training, and not to the target
    reached: bool = False  # whether it reached the target with every seed
    ratios: tuple[float, ...] = ()  # the steps of each seed
    own: Pairs = ()  # parallel blocks, or sizes and learning rate of a smaller dense model

    def to_the_loss(self, kind: str) -> Interval | None:
        """The ``time`` or ``energy`` to the loss."""
        mine, dense = ((c.seconds if kind == "time" else c.joules) or 0.0 for c in (self.layout, self.dense))
        if self.steps is None or not dense:
            return None
        low, high = (None if end is None else end * mine / dense for end in (self.steps.low, self.steps.high))
        return Interval(self.steps.mean * mine / dense, low, high, self.steps.count)

    @property
    def cost(self) -> Interval | None:
        """The cost to the loss, in the measure of the goal."""
        return self.to_the_loss(self.goal)

    @property
    def parallel(self) -> bool:
        """Whether it has parallel blocks, where those are candidates."""
        return bool(dict(self.own).get(_PARALLEL))

    @property
    def mean_cost(self) -> float:
        return self.cost.mean if self.cost else inf

    def to_dict(self) -> dict[str, Any]:
        """The model, its layout and its figures as plain data."""
        ratios = {"steps": self.steps, "time": self.to_the_loss("time"), "energy": self.to_the_loss("energy")}
        return {
            **self.layout.layout._asdict(),
            "wire": self.layout.wire,
            **dict(self.own),
            "step_seconds": self.layout.seconds,
            "modelled_joules_per_step": self.layout.joules,
            "reached": self.reached,
            "estimated": self.estimated,
            **{f"{name}_ratio": None if ratio is None else asdict(ratio) for name, ratio in ratios.items()},
        }


@dataclass(frozen=True)
class Trend:
    """The steps of a phantom model relative to the dense one over sizes: log ratio = a + slope log size."""

    blocks: int | None
    ghosts: int | None
    ratios: Mapping[int, tuple[float, ...]]  # of each seed, by size; none where the loss was not reached
    target: int  # the size to extrapolate to

    @cached_property
    def fit(self) -> tuple[Interval, Interval] | None:
        """The slope and the ratio at the target, with 95 % intervals; None without enough trainings. There are no
        intervals where nothing is known of the spread: the trainings of each size took the same steps.
        """
        x = [log(size) for size, ratios in self.ratios.items() for _ in ratios]
        if len(self.ratios) < 2 or not all(self.ratios.values()) or len(x) < 3:
            return None
        line: Any = stats.linregress(x, [log(ratio) for ratios in self.ratios.values() for ratio in ratios])
        count, away = len(x), log(self.target) - fmean(x)
        slope, ratio = float(line.slope), exp(line.intercept + line.slope * log(self.target))
        if not line.stderr > 1e-9:  # rounding, or NaN where all ratios are equal
            return Interval(slope, None, None, count), Interval(ratio, None, None, count)
        half = float(stats.t.ppf(0.975, count - 2) * line.stderr)
        factor = exp(half * sqrt(pvariance(x) + away**2))
        at_target = Interval(ratio, ratio / factor, ratio * factor, count)
        return Interval(slope, slope - half, slope + half, count), at_target

    @property
    def refusal(self) -> str | None:
        """Why the steps at the target are not known from the trend; None if they are."""
        if self.fit is None:
            return "the loss was not reached at every size, or there are fewer than three trainings"
        ends = [end for end in (self.fit[0].low, self.fit[0].high) if end is not None]
        if not ends:
            return "all trainings of a size took the same steps, and a smaller --eval-every may tell them apart"
        low, high = ((self.target / max(self.ratios)) ** end for end in ends)
        if low < 1 / LARGEST_CHANGE or high > LARGEST_CHANGE:
            return f"up to {self.target} the ratio of steps may change by a factor of {low:.2g} to {high:.2g}"
        return None

    def to_dict(self) -> dict[str, Any]:
        """The rows for JSON."""
        slope, ratio = (asdict(value) for value in self.fit) if self.fit else (None, None)
        return {
            **asdict(self),
            "rows": [{"size": size, "steps_ratios": list(ratios)} for size, ratios in self.ratios.items()],
            "slope": slope,
            "extrapolated_steps_ratio": ratio,
            "refusal": self.refusal,
        }


@dataclass(frozen=True)
class TuneResult:
    """What was measured: the target, the dense model's steps to it, and the phantom models, the cheapest first."""

    request: PlanRequest
    dense: Candidate
    target: float | None
    dense_steps: tuple[int, ...]
    rates: Mapping[str, float]  # by the name of a model
    models: tuple[Tuned, ...]
    skipped: int  # candidates whose step is not cheaper than the dense model's
    trends: tuple[Trend, ...] = ()  # over the sizes that were measured in place of the model's
    small: Tuned | None = None  # the smallest dense model that reaches the target
    parallel: bool = False  # whether the dense model's best has parallel blocks, where those are candidates
    wires: tuple[WireFormat, ...] = ("full",)  # formats that layouts may use

    @property
    def best(self) -> Tuned | None:
        """The cheapest of the models that reached the target."""
        return next((model for model in self.models if model.reached), None)

    @property
    def winner(self) -> Tuned | None:
        """The cheapest to the loss of phantom and smaller dense models, if its interval is below the dense model."""
        cheapest = min(filter(None, (self.best, self.small)), key=lambda model: model.mean_cost, default=None)
        cost = cheapest.cost if cheapest else None
        return cheapest if cost and cost.high is not None and cost.high < 1 else None

    @property
    def pays(self) -> bool:
        """Whether the cheapest to the loss is a phantom model."""
        return self.winner is not None and self.winner is self.best

    @property
    def verdict(self) -> str:
        """The recommendation in one sentence."""
        request, best, small, more = self.request, self.best, self.small, ""
        block = ", parallel block" if self.parallel else ""
        against = f"{self.dense.layout}{block}{wire_suffix(self.dense.wire)}, the best layout of the dense model on up "
        against += f"to {request.devices} devices of {request.profile.name}"
        if not self.rates:
            return f"Do not use phantom here: no candidate has a cheaper step than {against}."
        if self.trends:
            trend, sizes = self.trends[0], listed(map(str, self.trends[0].ratios))
            if best is None:
                return f"Nothing is extrapolated from {sizes}: {trend.refusal}. Measure larger sizes or more --seeds."
            more = f" Steps are measured at {sizes}, and extrapolated to {trend.target}."
        if best is None or best.cost is None:
            return (
                f"Do not use phantom here: no candidate reached the loss {self.target:.4g} of the dense model within "
                f"{AT_MOST} times its steps."
            )
        layout, block = best.layout.layout, ", parallel block" if best.parallel else ""
        model = f"phantom with {layout.blocks} blocks and {layout.ghosts} ghosts{block}{wire_suffix(best.layout.wire)}"
        loss = "the loss" if self.target is None else f"the loss {self.target:.4g}"
        cost = f"{best.cost} of the {request.goal} to {loss} of {against}"
        if small is not None and small.cost is not None:
            (name, size), *_ = small.own
            more = f" A dense model of {name} {size:,} takes {small.cost}."
        if self.pays:
            return f"Use {model}: it takes {cost}.{more}"
        if best.cost.includes_one and not (small and small.mean_cost < best.mean_cost):
            return f"It is not decided whether phantom pays here: {model} takes {cost}; try more --seeds.{more}"
        return f"Do not use phantom here: {model} takes {cost}.{more}"

    def to_dict(self) -> dict[str, Any]:
        """The measurements for JSON; ``best`` is what phantom plan --tuned reads."""
        request, dense = self.request, self.dense
        step = {"step_seconds": dense.seconds, "modelled_joules_per_step": dense.joules}
        return {
            "family": request.model.family,
            **request.model.settings,
            "batch": request.batch,
            "devices": request.devices,
            "hardware": request.profile.name,
            "goal": request.goal,
            "target_loss": self.target,
            "dense": {**dense.layout._asdict(), "wire": dense.wire, **step, "steps": list(self.dense_steps)}
            | ({_PARALLEL: True} if self.parallel else {}),
            "learning_rates": dict(self.rates),
            "candidates": [model.to_dict() for model in self.models],
            "best": self.best.to_dict() if self.best else None,
            "trends": [trend.to_dict() for trend in self.trends],
            "small_dense": self.small.to_dict() if self.small else None,
        }


def tune(
    settings: Settings,
    request: PlanRequest,
    grid: Iterable[tuple[bool, int, int]],
    options: RunOptions,
    minutes: float,
    size: str = "",
    sizes: Sequence[int] = (),
    wires: Sequence[WireFormat] = ("full",),
) -> TuneResult:
    """Find the blocks and ghosts of the ``grid`` (and parallel blocks or not) that reach the dense loss at the least
    cost, in about ``minutes``.

    With ``sizes`` in ascending order, values of the setting ``size``, steps are measured at these and extrapolated.
    Layouts may use any format of ``wires``.
    """
    dense = _best_layout(request, wires, {})
    models, reasons = list[Tuned](), list[str]()
    for parallel, blocks, ghosts in grid:
        try:  # models that are not possible are refused
            replace(settings, cells=({"strategy": "phantom", "blocks": blocks, "ghosts": ghosts},))
            kind = {_PARALLEL: True} if parallel else {}
            own = _best_layout(request, wires, kind, blocks=(blocks,), ghosts=(ghosts,))
        except ValueError as error:
            reasons.append(str(error))
        else:  # as if it needed as many steps as the dense model
            models.append(Tuned(own, dense, request.goal, _AS_MANY, own=tuple(kind.items())))
    if not models:
        raise ValueError(f"no phantom model of these blocks and ghosts is possible: {reasons[0]}")
    cheaper = [model for model in models if model.mean_cost < 1]
    settings = replace(settings, cells=_cells(cheaper))
    scaled = {value: replace(settings, training=settings.training | {size: value}) for value in sizes}
    for trained in scaled.values() or [settings]:
        first = trained.configs()[0]
        first.task().check(first)
    with FolderLock(options.out) as lock:
        prepare_folder(options.out, settings.to_dict(), options.resume, lock)
        untrained = tuple(replace(model, steps=None) for model in models)
        skipped, formats = len(models) - len(cheaper), tuple(wires)
        result = TuneResult(request, dense, settings.target_loss, (), {}, untrained, skipped, wires=formats)
        if not cheaper or not sizes:
            return launch(1, _measure, settings, options, result, cheaper, 60 * minutes) if cheaper else result
        measured = dict[int, TuneResult]()
        for value, trained in scaled.items():
            trained = replace(trained, cells=_cells(cheaper))
            budget, name = 60 * minutes / len(sizes), f"{size}={value} "
            measured[value] = launch(1, _measure, trained, options, result, cheaper, budget, name)
            cheaper = [model for model in measured[value].models if model.reached]
            if not cheaper:
                break
    return _extrapolated(result, measured, settings.training[size])


def _suffix(parallel: bool) -> str:
    """What the name of a contender has for parallel blocks."""
    return "+parallel" if parallel else ""


def _best_layout(
    request: PlanRequest, wires: Sequence[WireFormat], sizes: Mapping[str, Any], **phantom: Any
) -> Candidate:
    """The best layout over formats on the wire: of the dense model, or of the phantom model whose blocks and ghosts are
    given. ``sizes`` are those settings of the model that are not those of the request.
    """
    model = replace(request.model, settings={**request.model.settings, **sizes})
    strategy = tuple(name for name in request.strategy if (name == "phantom" if phantom else PLANNED[name].same_model))
    plans = [plan(replace(request, model=model, strategy=strategy, wire=wire, **phantom)) for wire in wires]
    return min((each for answer in plans for each in answer.candidates), key=partial(rank_by, request.goal))


def _cells(models: Sequence[Tuned]) -> tuple[dict[str, Any], ...]:
    """The dense model and the phantom models as cells of a grid."""
    cells: list[dict[str, Any]] = [{"strategy": "dense"}]
    for model in models:
        layout, name = model.layout.layout, f"phantom{_suffix(model.parallel)}"
        cells.append({"strategy": name, "blocks": layout.blocks, "ghosts": layout.ghosts})
    return tuple(cells)


def _extrapolated(result: TuneResult, measured: Mapping[int, TuneResult], target: int) -> TuneResult:
    """The steps of the last candidates at the target, where their trends over the measured sizes allow it."""
    pairs = list[tuple[Tuned, Trend]]()
    first, *_, last = (*measured.values(), *measured.values())
    for model in (model for model in first.models if not model.estimated):
        layout = model.layout.layout
        same = {size: [m.ratios for m in own.models if m.layout.layout == layout] for size, own in measured.items()}
        ratios = {size: known[0] if known else () for size, known in same.items()}
        trend = Trend(layout.blocks, layout.ghosts, ratios, target)
        fit = trend.fit if trend.refusal is None else None
        pairs.append((replace(model, steps=fit[1] if fit else None, reached=fit is not None), trend))
    pairs.sort(key=lambda pair: (not pair[0].reached, pair[0].mean_cost))
    models, trends = tuple(model for model, _ in pairs), tuple(trend for _, trend in pairs)
    return replace(result, rates=last.rates, models=models, trends=trends)


def _measure(
    device: torch.device,
    settings: Settings,
    options: RunOptions,
    result: TuneResult,
    models: Sequence[Tuned],
    budget: float,
    prefix: str = "",  # of the names of trainings
) -> TuneResult:
    finished: dict[str, Run] = {}
    with cell_runner(device, settings, options) as runner:

        def train(name: str, config: TrainConfig, limit: float = inf) -> Run:
            if spent() > limit:
                raise TimeoutError
            if name not in finished:
                finished[name] = runner.train(prefix + name, config)
            return finished[name]

        def spent() -> float:  # in steps, which a folder has too: a resumed call decides as the first one did
            return sum(run.seconds for run in finished.values())

        def search_rates(contenders: Sequence[Contender]) -> dict[str, float]:
            trained = {each.label: partial(settings.config, each, seed=settings.search.seed) for each in contenders}
            tried = search(trained, settings.search, train)
            return {label: trial.lr for label, trials in tried.items() for trial in trials if trial.chosen}

        dense, *phantoms = settings.contenders
        named = {contender.label: model for contender, model in zip(phantoms, models, strict=True)}
        trials = len(settings.search.learning_rates)
        runner.total = (1 + len(phantoms)) * (trials + 1) + (1 + FINALISTS) * settings.seeds
        rates = search_rates([dense])
        one_search, runs = spent(), list[Run]()
        while len(runs) < settings.seeds and (not runs or spent() < _DENSE_SHARE * budget):
            config = settings.config(dense, lr=rates[dense.label], seed=len(runs), target=settings.target_loss)
            runs.append(train(f"dense seed={config.seed} lr={config.lr:g}", config))
        target = _target(settings, runs)
        runs = [to_target(run, target, settings.steps, None) for run in runs]
        final = replace(settings, target_loss=target, steps=AT_MOST * settings.steps)
        if any(model.parallel for model in result.models):  # the dense model has them if they reach it at less cost
            final = replace(final, cells=({"strategy": "dense+parallel"},))
            rates |= (rate := search_rates(final.contenders))
            model, trained = _dense_model(result, final, runs, train, {_PARALLEL: True}, *rate.values())
            if model is not None and model.mean_cost < 1:
                result, runs = replace(result, dense=model.layout, parallel=True), trained
                named = {label: replace(model, dense=result.dense) for label, model in named.items()}
        affordable = max(FINALISTS, int(_SEARCH_SHARE * budget / max(one_search, 1e-9)))
        phantoms = phantoms[:: -(-len(phantoms) // affordable)]  # evenly over blocks and ghosts
        named = {contender.label: named[contender.label] for contender in phantoms}
        rates |= search_rates(phantoms)
        steps, left = settings.search.steps, {contender.label: contender for contender in phantoms}
        while True:
            for label, contender in left.items():
                config = settings.config(contender, lr=rates[label], seed=settings.search.seed, steps=steps)
                first = steps == settings.search.steps
                name = f"search {label} lr={config.lr:g}" if first else f"rung {label} steps={steps} lr={config.lr:g}"
                named[label] = replace(named[label], steps=_relative_steps(train(name, config), runs[0]))
            order = sorted(left, key=lambda label: named[label].mean_cost)
            if spent() > _RUNGS_SHARE * budget or len(left) <= FINALISTS or 2 * steps > settings.steps:
                break
            left, steps = {label: left[label] for label in order[: max(FINALISTS, (len(order) + 1) // 2)]}, 2 * steps
        pairs: dict[str, list[tuple[float, float]]] = {label: [] for label in order[:FINALISTS]}
        for reference in runs:
            for label in in_turn(list(pairs), reference.seed):
                if spent() < budget or not any(pairs.values()):
                    seed, most = reference.seed, AT_MOST * settings.steps
                    config = settings.config(left[label], lr=rates[label], seed=seed, steps=most, target=target)
                    run = train(f"{label} seed={seed} lr={config.lr:g} loss={target:.6g}", config)
                    pairs[label].append((run.steps if run.reached else 0, reference.steps))
        with suppress(TimeoutError):  # then it is not known
            in_time = partial(train, limit=0 if prefix else budget)
            result = _with_smaller(result, final, runs, in_time)
    for label, counts in pairs.items():
        if counts:
            reached = all(steps for steps, _ in counts)
            measured = ratio_interval(counts) if reached else None
            ratios = tuple(steps / dense_steps for steps, dense_steps in counts) if reached else ()
            named[label] = replace(named[label], steps=measured, reached=reached, estimated=False, ratios=ratios)
    ordered = sorted(named.values(), key=lambda model: (not model.reached, model.mean_cost))
    dense_steps = tuple(run.steps for run in runs)
    return replace(result, target=target, dense_steps=dense_steps, rates=rates, models=tuple(ordered))


def _with_smaller(result: TuneResult, settings: Settings, runs: Sequence[Run], train: Train) -> TuneResult:
    """The result with the smallest dense model that reaches the target loss, if there is one on the same data."""
    name = f"{SMALL_DENSE}{_suffix(result.parallel)}"
    try:
        settings = replace(settings, cells=({"strategy": name},))
    except ValueError:  # the data come from a teacher of the size of the model
        return result
    sizes, trials = find_smaller(settings, train)
    if not sizes:
        return result
    lr = next(trial.lr for trial in trials if trial.chosen)
    own = sizes | ({_PARALLEL: True} if result.parallel else {})
    return replace(result, small=_dense_model(result, replace(settings, smaller=sizes), runs, train, own, lr)[0])


def _dense_model(
    result: TuneResult, settings: Settings, runs: Sequence[Run], train: Train, own: dict[str, Any], lr: float
) -> tuple[Tuned | None, list[Run]]:
    """A dense model with settings of its ``own``, trained to the target with every seed; None if it misses it."""
    (contender,), request = settings.contenders, result.request
    configs = [settings.config(contender, lr=lr, seed=run.seed, target=settings.target_loss) for run in runs]
    names = (" ".join(filter(None, (contender.label, contender.variant))) for _ in runs)
    trained = [train(f"{name} seed={config.seed}", config) for name, config in zip(names, configs, strict=True)]
    if not all(run.reached for run in trained):
        return None, trained
    steps = ratio_interval([(run.steps, dense.steps) for run, dense in zip(trained, runs, strict=True)])
    layout = _best_layout(request, result.wires, own)
    return Tuned(layout, result.dense, request.goal, steps, False, True, own=(*own.items(), ("lr", lr))), trained


def _target(settings: Settings, runs: Sequence[Run]) -> float:
    """The loss that every run of the dense model has reached."""
    losses = [run.loss for run in runs if run.loss is not None]
    if len(losses) < len(runs):
        raise ValueError("the dense model reached no finite loss: give smaller --learning-rates")
    if settings.target_loss is not None and not all(run.reached for run in runs):
        raise ValueError(
            f"the dense model did not reach the loss {settings.target_loss:g} in {settings.steps} steps, but "
            f"{max(losses):.4g}: give more --steps, or that as --target-loss"
        )
    return max(losses) if settings.target_loss is None else settings.target_loss


def _relative_steps(run: Run, dense: Run) -> Interval | None:
    """Steps of a run over those after which the dense model first had its lowest loss; None if it diverged."""
    if run.loss is None:
        return None
    loss = min(point.loss for point in run.curve)
    steps = next((point.step for point in dense.curve if point.loss <= loss), dense.curve[-1].step)
    return Interval(run.steps / steps, None, None, 1)


def _table(result: TuneResult) -> Iterable[str | Table]:
    """A line about the dense model, the table of what is relative to it, and lines that explain it."""
    step = quantity(result.dense.seconds, "s")
    steps = f"{fmean(result.dense_steps):,.0f} steps of {step}" if result.dense_steps else f"{step} a step"
    yield f"\nRelative to the dense model: {steps} by {result.dense.layout}"
    caption = "95 % intervals over seeds; ~ estimated from a short training; times and energies of a step are modelled"
    skipped = counted(result.skipped, "candidate")
    caption += f"; not trained: {skipped} with a dearer step than the dense model's" if result.skipped else ""
    caption += "; steps are those of full precision, whatever the wire format" if result.wires != ("full",) else ""
    caption += "; small: the smallest dense model that reaches the loss" if result.small else ""
    headings = ("blocks", "ghosts", "ranks\nx dp", f"{result.request.goal}\na step", "steps", "time", "energy")
    table = make_table(headings, left=0)
    for model in filter(None, (*result.models, result.small)):
        layout, cells = model.layout.layout, [format_ratio(replace(model, steps=_AS_MANY).mean_cost)]
        for ratio in (model.steps, model.to_the_loss("time"), model.to_the_loss("energy")):
            text = "-" if ratio is None else str(ratio).replace(" [", "\n[")  # which may be wide
            cells.append(f"~{format_ratio(ratio.mean)}" if ratio and model.estimated else text)
        name = (str(layout.blocks), str(layout.ghosts)) if layout.blocks else ("small", "-")
        kinds = {model.layout.wire: model.layout.wire != "full", "parallel": model.parallel}
        lines = [f"{layout.ranks} x {layout.dp}", *(kind for kind, shown in kinds.items() if shown)]
        table.add_row(*name, "\n".join(lines), *cells)
    yield from (table, caption)


def _trend_table(result: TuneResult) -> Iterable[str | Table]:
    """The steps by size, with lines before and after that explain them."""
    sizes = result.trends[0].ratios
    yield "\nSteps relative to the dense model by size, and slope of log ratio against log size"
    caption = f"measured but for {result.trends[0].target}, which is extrapolated; 95 % intervals over trainings"
    headings = ("blocks", "ghosts", *map(str, sizes), "slope", str(result.trends[0].target))
    table = make_table(headings, left=0)
    for trend in result.trends:
        ratios = [format_ratio(geometric_mean(trend.ratios[size])) if trend.ratios[size] else "-" for size in sizes]
        slope, ratio = map(str, trend.fit) if trend.fit else ("-", "-")
        table.add_row(str(trend.blocks), str(trend.ghosts), *ratios, slope, "refused" if trend.refusal else ratio)
    yield from (table, caption)


def _command(result: TuneResult, options: TuneOptions) -> str:
    """The command that trains the recommended model on the target."""
    best, per_node = result.winner, int(result.request.profile.devices_per_node.value)
    chosen = best.layout if best else result.dense
    layout = chosen.layout
    count = layout.ranks * layout.dp
    block = _suffix(best.parallel if best else result.parallel)
    name = f"phantom{block} blocks={layout.blocks} ghosts={layout.ghosts}" if best else f"dense{block}"
    usual = Layout._field_defaults | {"dp": 1, "wire": "full"}
    planned: dict[str, Any] = layout._asdict() | {"wire": chosen.wire}
    values = {key: value for key, value in planned.items() if value != usual.get(key)}
    given = {key: getattr(options, key) for key in options.training}
    values |= {key: value for key, value in given.items() if value != options.training[key]}
    values |= {_PARALLEL: True} if block or result.request.model.settings.get(_PARALLEL) else {}
    values |= {"steps": AT_MOST * options.steps, **dict(best.own)} if best else {"steps": options.steps}
    values |= {"target_loss": f"{result.target:.6g}"} if result.target else {}
    values |= {"lr": f"{result.rates[name]:g}"} if name in result.rates else {}
    words = [f"torchrun --standalone --nproc-per-node {count} -m phantom_parallel.cli.main train {options.family}"]
    if count > per_node:
        tasks = f"--ntasks-per-node {per_node} --gpus-per-node {per_node}"
        words = [f"srun --nodes {-(-count // per_node)} {tasks} phantom train {options.family}"]
    for key, value in values.items():
        option = key.replace("_", "-")
        flag = f"--{option}" if value else f"--no-{option}"
        words.append(flag if isinstance(value, bool) else f"--{option} {shlex.quote(str(value))}")
    return " ".join([*words, "--out run"])
