"""Options that several commands share, with one name and one help text, and the parser of options."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass, replace
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast, get_args, get_origin, get_type_hints

import tyro

from phantom_parallel.distributed.launchers import (
    external_ranks,
    is_local_rank_zero,
    launched_externally,
    reports_error,
)
from phantom_parallel.families.registry import family_names, get_family
from phantom_parallel.utils.network import Network
from phantom_parallel.utils.parsing import choose_from, field_docs
from phantom_parallel.utils.settings import Setting
from phantom_parallel.utils.strategies import WireFormat

if TYPE_CHECKING:
    from phantom_parallel.cost.planner import ModelSizes

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]

# Groups of a command's help after its own options, in order, and the options in each. Options of a nested config are in
# a group of its name.
GROUPS: dict[str, tuple[str, ...]] = {
    "model": ("blocks", "ghosts"),
    "data": (
        *("data", "batch", "samples", "teacher_blocks", "teacher_ghosts", "teacher_depth"),
        *("pattern", "max_bytes", "tokenizer", "eval_windows"),
    ),
    "ranks": (
        *("strategy", "ranks", "dp", "device", "timeout", "wire", "micro_batches", "reshard_after_forward", "fsdp"),
        *("interleave", "activation_checkpointing", "compile"),
    ),
    "optimizer": (
        *("gradient_accumulation_steps", "steps", "target_loss", "optimizer", "lr", "schedule", "warmup"),
        *("momentum", "weight_decay", "max_grad_norm", "lr_local", "lr_compress", "lr_decompress", "dtype", "seed"),
    ),
    "checkpoints": ("resume", "checkpoint_every", "keep"),
    "output": ("out", "json", "report_only", "log_every", "eval_every", "profile"),
    "emulated_hosts": ("hosts", "link", "link_delay", "link_loss", "hosts_optional"),
}
_MAX_UNGROUPED = 12  # options of a command whose help is one group


@dataclass(frozen=True, kw_only=True)
class JsonOption:
    """The option ``--json``."""

    json: Flag = False
    """Print the results as JSON."""


@dataclass(frozen=True, kw_only=True)
class ProfileOption:
    """The option ``--profile`` of commands that measure or model energy."""

    profile: str | None = None
    """Hardware profile whose watts the energy is modelled with if there are no sensors; by default this machine's as
    phantom machine measure --watts wrote it, otherwise watts that are assumed of a CPU core. See phantom machine
    show."""


@dataclass(frozen=True, kw_only=True)
class WireOption:
    """The option ``--wire`` of commands that run or count a model on ranks."""

    wire: WireFormat = "full"
    """Format in which activations, ghosts and their gradients travel between the ranks that share a model: as they are
    (full), bf16, or int8 with one scale per row. Products and sums keep their precision."""


@dataclass(frozen=True, kw_only=True)
class RanksOption:
    """The option ``--ranks`` of commands that run a trained model."""

    ranks: int | None = None
    """Ranks that share the model; by default 1, or as many as the launcher (torchrun, srun, mpirun, ...) started."""

    def rank_count(self) -> int:
        """The number of ranks, of the option or of the external launcher."""
        return external_ranks() if self.ranks is None else self.ranks


@dataclass(frozen=True, kw_only=True)
class TimeoutOption:
    """The option ``--timeout``."""

    timeout: float = 60.0
    """Seconds that a rank waits for another one in an exchange. After that, the rank that did not answer is named, and
    all are stopped."""

    def exchange_timeout(self) -> timedelta:
        """The option as a time.

        Raises:
            ValueError: If it is not a time.
        """
        if not 1 <= self.timeout <= 1e6:
            raise ValueError(f"timeout must be from 1 to 1,000,000 seconds, got {self.timeout:g}")
        return timedelta(seconds=self.timeout)


@dataclass(frozen=True, kw_only=True)
class NetworkOptions(TimeoutOption):
    """Options of commands that launch ranks: emulated hosts, their links, and how long exchanges may take."""

    hosts: int | None = None
    """Number of emulated hosts that the ranks are spread over: network namespaces on this machine, with loopback inside
    a host and --link between hosts. By default all ranks share loopback."""
    link: str | None = None
    """Rate of each host's link, as tc writes it: 100mbit, 1gbit, none. like:PROFILE measures the FLOP/s of a rank and
    chooses the rate at which it has the FLOP-to-byte ratio of a device of that machine between its nodes, and
    inside a host that of the links inside a node; like:PROFILE:inside has the latter between hosts. Profiles: see
    phantom machine show."""
    link_delay: str = "0"
    """How much longer a packet takes one way, such as 1ms; needs a kernel with netem."""
    link_loss: str = "0%"
    """Packets that are lost, such as 0.1%; needs a kernel with netem."""

    def network(self, ranks: int, dtype: str = "fp32") -> Network | None:
        """The network of a launch of ``ranks`` ranks that compute in ``dtype``; None without emulated hosts."""
        from phantom_parallel.cost.calibrate import network_of

        options = {"dtype": dtype, "delay": self.link_delay, "loss": self.link_loss}
        return network_of(self.hosts, self.link, ranks, **options)

    @contextmanager
    def launching(self, ranks: int, dtype: str = "fp32") -> Iterator[Network | None]:
        """Launches inside this block run on the network and with the timeout of the options."""
        from phantom_parallel.distributed.launch import launch_defaults

        timeout, network = self.exchange_timeout(), self.network(ranks, dtype)
        with launch_defaults(timeout, network, getattr(self, "device", "auto"), announces=True):
            yield network


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(NetworkOptions):
    """Options of commands that run a model on ranks: those of the network, and the device."""

    device: str = "auto"
    """Device of each rank: cpu, cuda, xpu, ..., of which there must be one for each rank of a host; auto uses them if
    there are enough, and the CPU otherwise."""


def parse(options: type[Any], prog: str, arguments: list[str], defaults: Mapping[str, Any] | None = None) -> Any:
    """Parse a command's options.

    Args:
        options: A dataclass. Fields that are dataclasses themselves are options too, without a prefix.
        prog: The command, for its help.
        arguments: The arguments.
        defaults: Replace those of the class; names that it does not have are ignored.
    """
    leaves = list(_leaves(options, defaults or {}, None))
    if len(leaves) <= _MAX_UNGROUPED:
        leaves = [replace(leaf, group=None) for leaf in leaves]
    with _printed_once() if launched_externally() else nullcontext():
        parsed = tyro.cli(_grouped(options, leaves), prog=prog, args=arguments, config=(tyro.conf.OmitArgPrefixes,))
    owners = {leaf.name: parsed if leaf.group is None else getattr(parsed, _member(leaf.group)) for leaf in leaves}
    return _build(options, {name: getattr(owner, name) for name, owner in owners.items()})


@contextmanager
def _printed_once() -> Iterator[None]:
    """Print the help or an error of the parser once on each host."""
    text = StringIO()
    try:
        with redirect_stdout(text), redirect_stderr(text):
            yield
    except SystemExit as leaving:
        if reports_error() if leaving.code else is_local_rank_zero():
            print(text.getvalue(), end="", file=sys.stderr if leaving.code else sys.stdout)
        raise


@dataclass(frozen=True)
class _Leaf:
    """An option: a field of a command's class, or of a config that it holds."""

    name: str
    group: str | None  # of the help; None for the command's own options
    kind: Any
    default: Any  # a dataclass field


def _leaves(options: type[Any], defaults: Mapping[str, Any], parent: str | None) -> Iterator[_Leaf]:
    hints, docs = get_type_hints(options, include_extras=True), field_docs(options)
    for option in fields(options):
        kind = hints[option.name]
        if not option.init:
            continue
        if is_dataclass(kind):
            yield from _leaves(cast(type[Any], kind), defaults, option.name)
            continue
        value = defaults.get(option.name, option.default)
        default = field(default=value, kw_only=True)
        if option.default_factory is not MISSING and option.name not in defaults:
            default = field(default_factory=option.default_factory, kw_only=True)
        first, *others = get_args(kind) if get_origin(kind) is Annotated else (kind,)
        if option.name in docs:  # innermost, so that a text which the option has already replaces it
            hint = "" if value is None else None
            others = [
                tyro.conf.arg(help=docs[option.name], metavar=_metavar(first), help_behavior_hint=hint),
                *others,
            ]
        group = next((group for group, names in GROUPS.items() if option.name in names), parent)
        yield _Leaf(option.name, group, Annotated[first, *others] if others else first, default)


def _metavar(kind: Any) -> str | None:
    """What stands for the value of an optional option: ``INT``, where the parser would write ``{None}|INT``."""
    members = get_args(kind)
    if type(None) not in members or len(members) != 2 or not isinstance(members[0], type):
        return None
    return members[0].__name__.upper()


def _member(group: str) -> str:
    """Field of a group in the class for the parser, which has options of its own, such as ``--model``."""
    return f"{group}_group"


def _grouped(options: type[Any], leaves: Iterable[_Leaf]) -> type[Any]:
    """A class for the parser that has the command's own options, and holds a class for each group of the others."""
    members: dict[str | None, list[tuple[str, Any, Any]]] = {None: [], **{group: [] for group in GROUPS}}
    for leaf in leaves:
        members.setdefault(leaf.group, []).append((leaf.name, leaf.kind, leaf.default))
    own = members.pop(None)
    groups = [
        (_member(group), Annotated[make_dataclass(group, held, frozen=True), tyro.conf.arg(name=group)], field())
        for group, held in members.items()
        if group is not None and held
    ]
    parser = make_dataclass(options.__name__, [*own, *groups], frozen=True)
    parser.__doc__ = options.__doc__
    return parser


def _build(options: type[Any], values: Mapping[str, Any]) -> Any:
    """The options from their values, the dataclasses that they hold first."""
    hints = get_type_hints(options)
    return options(
        **{
            option.name: _build(hints[option.name], values) if is_dataclass(hints[option.name]) else values[option.name]
            for option in fields(options)
            if option.init
        }
    )


def split_family(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Split off the first argument if it is the name of a family."""
    if arguments and arguments[0] in family_names():
        return arguments[0], arguments[1:]
    return None, arguments


def check_first_word(arguments: list[str], command: str, family: str | None) -> None:
    """Raise a ValueError if ``arguments``, without a family's name, begin with a word that is no option."""
    if not arguments or arguments[0].startswith("-"):
        return
    if family is None:
        raise ValueError(f"there is no model family {arguments[0]!r}: {choose_from(arguments[0], family_names())}")
    raise ValueError(f"unexpected {arguments[0]!r} after {family}: see phantom {command} {family} --help")


def value_of(option: str, arguments: list[str]) -> str | None:
    """Return the value of an option such as ``--out`` among arguments that are not parsed yet."""
    for index, argument in enumerate(arguments):
        if argument == option and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2]
    return None


def ranks_of_launcher(arguments: list[str], dp: int = 1) -> dict[str, int]:
    """The default of ``--ranks`` where another launcher has started the ranks: their number over ``--dp``.

    Args:
        arguments: Those of the command, not parsed yet.
        dp: Copies of the model if ``arguments`` have none.
    """
    if not launched_externally() or value_of("--ranks", arguments) or value_of("--tp", arguments):
        return {}
    copies = value_of("--dp", arguments) or str(dp)
    return {"ranks": max(1, external_ranks() // int(copies))} if copies.isdigit() and int(copies) else {}


def folder_of(arguments: list[str]) -> Path | None:
    """Return the value of ``--out`` among arguments that are not parsed yet."""
    value = value_of("--out", arguments)
    return None if value is None else Path(value)


def command_line() -> str:
    """Return the command as the user typed it."""
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])


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
    def model(self) -> "ModelSizes":
        """The sizes of the model."""
        from phantom_parallel.cost.planner import ModelSizes

        return ModelSizes(self.family, {name: getattr(self, name) for name in self.sizes})


def with_sizes(base: type[ModelOptions], family: str, command: str, **choices: tuple[Any, Any]) -> type[Any]:
    """The options of ``base`` with the sizes of a family's models.

    Args:
        base: The options that do not depend on the family.
        family: The family's name.
        command: The command, for the help.
        **choices: Type and default of each field of ``base`` that depends on the family.
    """
    from phantom_parallel.cost.planner import Layout

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
