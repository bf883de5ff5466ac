"""``phantom dryrun``: what one rank of many would compute, send and keep, from the real model code without data."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from operator import attrgetter, methodcaller
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from phantom_parallel.cli import options
from phantom_parallel.cli.options import Flag, JsonOption, ModelOptions, WireOption
from phantom_parallel.cost.dryrun import DryRun, Messages, dry_run, exchanges_in_turn, layouts, profile
from phantom_parallel.cost.hardware import WORD_BYTES, load_profile
from phantom_parallel.cost.planner import Layout, ModelSizes
from phantom_parallel.cost.terms import Optimizer, Phase, Shape
from phantom_parallel.cost.timing import PHASES, step_time
from phantom_parallel.families.registry import get_family
from phantom_parallel.study.units import quantity
from phantom_parallel.utils.files import json_text
from phantom_parallel.utils.strategies import StrategyName, get_strategy, wire_suffix

MAX_CONTEXT = 4096  # tokens of a sequence of a model that is known by its name


@dataclass(frozen=True, kw_only=True)
class DryRunOptions(ModelOptions, WireOption, JsonOption):
    """Run one step of one rank without data, and count what it computes, sends and keeps.

    The real model code runs on tensors that have shapes only, in a process group whose other ranks do not exist. The
    counts are then compared with the formulas, to the unit.
    """

    strategy: StrategyName = "phantom"
    """How the model is sharded."""
    blocks: int | None = None
    """Blocks of the features, for phantom; by default the larger of 4 and ranks."""
    ghosts: int | None = None
    """Values that a block sends to the others, for phantom; by default 16."""
    ranks: int = 16
    """Ranks that share the model."""
    rank: int = 0
    """The rank that is run."""
    pp: int = 1
    """Stages of a transformer's layers, with ranks ranks in each."""
    dp: int = 1
    """Data-parallel copies."""
    micro_batches: int | None = None
    """Micro-batches that pass through the stages of a pipeline; by default as many as stages."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after forward and gather them again for backward, for fsdp."""
    batch: int = 64
    """Rows (sequences) of one step, over all data-parallel copies."""
    dtype: Literal["fp64", "fp32", "bf16"] = "fp32"
    """The type of every number."""
    optimizer: Optimizer = "adam"
    """What keeps state: none (sgd), one (momentum) or two words a parameter (adam)."""
    mode: str = "train"
    """A training step, or a pass of inference."""
    hardware: str | None = None
    """Also model the time and the energy of the step on this machine, beside the least energy that its FLOPs would take
    there: a hardware profile's name, or the path of a .toml file."""
    communication: Flag = False
    """Show the messages of a rank instead, by operation, size and phase; of phantom, beside its baseline. Also what
    inference sends in other layouts of as many ranks: a pipeline, and stages of several ranks."""

    def _shape(self, layout: Layout) -> Shape:
        run = {name: getattr(self, name) for name in ("batch", "wire", "optimizer", "rank")}
        return self.model_sizes.shape(layout, word_bytes=WORD_BYTES[self.dtype], **run)

    def run(self) -> None:
        layout = Layout(**{name: getattr(self, name) for name in Layout._fields if hasattr(self, name)})
        if self.communication:
            self._communication(layout.filled())
        else:
            passes = self._shape(layout).passes()
            if self.mode not in passes:
                raise ValueError(f"the strategy {self.strategy} is for training: {self.mode} runs on ranks by megatron")
            modelled = {} if self.hardware is None else self._modelled(passes[self.mode], self.hardware)
            result = dry_run(passes[self.mode])
            if self.json:
                print(json_text(result.to_dict() | ({"modelled": modelled} if modelled else {})))
            _require_agreement(result)
            if not self.json:
                _show(result, self._title(layout.filled()), modelled)

    def _modelled(self, shape: Shape, hardware: str) -> dict[str, Any]:
        """Time and energy of the step on a machine, and the least energy; None where the profile has no watts."""
        step = step_time(shape, load_profile(hardware), self.dtype, PHASES if shape.mode == "train" else ("forward",))
        names = ("joules", "least_joules", "least_exchange_joules", "energy_gap", "mfu")
        return {"hardware": hardware, "seconds": step.total} | {name: getattr(step, name) for name in names}

    def _communication(self, layout: Layout) -> None:
        if self.mode != "train":
            raise ValueError(f"--communication shows all phases: leave out --mode {self.mode}")
        if self.ranks * self.pp * self.dp == 1:
            raise ValueError("one rank sends nothing, so there is no communication to show: use --ranks of 2 or more")
        shapes: dict[str, Shape] = {layout.strategy: self._shape(layout)}
        baseline = get_family(self.model_sizes.family).baseline
        if layout.blocks is not None:
            shapes[baseline] = shapes[layout.strategy].with_strategy(baseline)
        for shape in shapes.values():
            for step in shape.passes().values():
                _require_agreement(dry_run(step))
        profiles = {strategy: profile(shape) for strategy, shape in shapes.items()}
        title = f"Messages of one rank: {' and '.join(shapes)}\n{self._title(layout)}"
        if self.json:
            print(json_text([{"profile": name, **asdict(row)} for name, rows in profiles.items() for row in rows]))
            return
        console = Console(highlight=False)
        console.print(message_table(profiles, title))
        steps = {mode: step for mode, step in shapes[layout.strategy].passes().items() if mode != "train"}
        if steps:
            console.print(self._layouts({mode: layouts(step, baseline) for mode, step in steps.items()}))

    def _layouts(self, passes: Mapping[str, Mapping[str, Shape]]) -> Table:
        """What the passes of inference send in every layout, and how long they take on a machine if one is given."""
        machine = None if self.hardware is None else load_profile(self.hardware)
        kinds = ("exchanges", "sent", *(["time"] if machine else []))
        headings = ("layout:\nranks x stages", *(f"{mode}\n{kind}" for mode in passes for kind in kinds))
        caption = "exchanges that follow one another; bytes of the rank that sends most"
        caption += "; times are modelled" if machine else ""
        table = options.make_table(headings, title="Inference on as many ranks", caption=caption, title_justify="left")
        for name in next(iter(passes.values())):
            cells = []
            for shape in (shapes[name] for shapes in passes.values() if name in shapes):
                sent = max(stage.moved_bytes() for stage, _ in shape.stages())
                cells += [f"{exchanges_in_turn(shape):,}", quantity(sent, "B")]
                cells += [quantity(step_time(shape, machine, self.dtype, ("forward",)).total, "s")] if machine else []
            table.add_row(name, *cells)
        return table

    def _title(self, layout: Layout) -> str:
        sizes = self.model_sizes.config.summary
        hint = f" (see --batch; --context, {MAX_CONTEXT:,} at most by default)" if self.like else ""
        return f"{layout}, rank {self.rank}\n{sizes}, batch {self.batch:,}{wire_suffix(self.wire)}{hint}"


def options_for(family: str | None, arguments: list[str]) -> tuple[type[DryRunOptions], dict[str, Any]]:
    """The options for models of a family."""
    family, sizes = options.model_defaults(family, arguments)
    chosen = get_family(family)
    strategies, modes = chosen.strategies, chosen.shape.modes
    choices = {"strategy": (Literal[strategies], strategies[0]), "mode": (Literal[modes], modes[0])}
    defaults = chosen.shape.example | sizes
    if sizes:  # as many ranks as its heads allow, with a block each
        config = ModelSizes(family, sizes).config
        for ranks in range(1, DryRunOptions.ranks + 1):
            with suppress(ValueError):
                config.check_ranks(ranks)
                defaults["ranks"] = ranks
        if options.value_of("--strategy", arguments) in (None, "phantom"):
            defaults["blocks"] = defaults["ranks"]
        strategy = get_strategy(options.value_of("--strategy", arguments) or strategies[0])
        divided = any(options.value_of(name, arguments) for name in ("--dp", "--pp"))
        if not (strategy.shards_rows or strategy.splits_depth or divided):  # which divide the batch
            defaults["batch"] = 1
        defaults |= {"context": min(sizes["context"], MAX_CONTEXT)} if "context" in sizes else {}
    return options.with_sizes(DryRunOptions, family, "dryrun", sizes, **choices), defaults


def message_table(profiles: Mapping[str, Sequence[Messages]], title: str) -> Table:
    """Phase by phase, the profiles below each other."""
    headings = ("phase", "operation", "count", "message", "bytes sent")
    table = options.make_table(headings, left=2, title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("carries")
    for phase in dict.fromkeys(row.phase for messages in profiles.values() for row in messages):
        table.add_section()
        table.add_row(phase, style="bold")
        for name, messages in profiles.items():
            rows = [row for row in messages if row.phase == phase]
            for row in rows:
                numbers = f"{row.count:,}", f"{row.message_bytes:,}", f"{row.sent_bytes:,}"
                table.add_row(f"  {name}", row.operation, *numbers, row.carries)
            if len(rows) > 1:
                count, sent = sum(row.count for row in rows), sum(row.sent_bytes for row in rows)
                table.add_row(f"  {name}", "all", f"{count:,}", "", f"{sent:,}", style="bold")
    return table


def _require_agreement(result: DryRun) -> None:
    if result.differences:
        count, first = len(result.differences), result.differences[0]
        raise ValueError(f"formulas and code differ in {count} terms, which is a defect of this package: {first}")


def _show(result: DryRun, title: str, modelled: Mapping[str, Any]) -> None:
    """Print the counts, which the formulas agree with: so these give the sums over all ranks."""
    console, shape = Console(), result.shape
    console.print(f"Formulas and code agree in every term ({shape.step_name}, {result.seconds:.2f} s).")
    counts = options.make_table((shape.step_name, "this rank", "all ranks"), title=title, title_justify="left")

    def add(name: str, count: Callable[[Shape], int], unit: str = "B") -> None:
        counts.add_row(name, quantity(count(shape), unit), quantity(shape.over_all_ranks(count), unit))

    trains, near = shape.mode == "train", shape.inside
    phases: tuple[Phase, ...] = ("forward", "backward") if trains else ("forward",)
    for phase in phases:
        add(f"{phase}, computed", lambda s, phase=phase: 2 * s.multiply_adds(phase), "FLOP")  # type: ignore[misc]
    for phase in phases:
        add(f"{phase}, sent", methodcaller("moved_bytes", phase))
        if near > 1:
            inside = methodcaller("moved_bytes", phase, near=near)
            add(f"  inside blocks of {near} ranks", inside)
            add("  between blocks", lambda s, p=phase, inside=inside: s.moved_bytes(p) - inside(s))  # type: ignore[misc]
    if trains and shape.moved_bytes("sync"):
        add("sync, sent", methodcaller("moved_bytes", "sync"))
    counts.add_section()
    for kind in ("parameters", "gradients", "optimizer", "activations", "total"):
        if trains or kind not in ("gradients", "optimizer"):
            name = "cache" if kind == "activations" and not trains else kind
            add(f"memory, {name}", attrgetter(f"memory.{kind}"))
    counts.add_section()
    counts.add_row("parameters", f"{shape.parameters:,}", f"{shape.model_parameters:,} (of the model)")
    console.print(counts)
    if modelled:
        units = {"seconds": "s", "joules": "J", "least_joules": "J", "energy_gap": "%", "mfu": "%"}
        values = [modelled[name] for name in units]
        shown = ["-" if v is None else quantity(v, unit) for v, unit in zip(values, units.values(), strict=True)]
        text = "Modelled on {}: {}, {}; at least {} for its FLOPs, a gap of {}; MFU {}"
        console.print(text.format(modelled["hardware"], *shown), markup=False)
    console.print(result.ledger.table())
