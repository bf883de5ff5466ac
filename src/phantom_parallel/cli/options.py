"""Options that several commands share, with one name, one help text and their aliases, and the parser of options."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tyro

from phantom_parallel.distributed.external import is_local_rank_zero, launched_externally, reports_error, slurm_ranks
from phantom_parallel.families.registry import family_names
from phantom_parallel.utils.docs import field_docs
from phantom_parallel.utils.names import choose_from
from phantom_parallel.utils.network import Network
from phantom_parallel.utils.wire import WireFormat

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]

# Other names of options: what people type elsewhere, and what options were called in earlier releases.
ALIASES: dict[str, tuple[str, ...]] = {
    "ranks": ("--tp",),
    "gradient_accumulation_steps": ("--accumulate",),
    "max_grad_norm": ("--clip",),
    "activation_checkpointing": ("--recompute",),
    "tie_embeddings": ("--tied",),
    "context": ("--sequence",),
    "mode": ("--task",),
}


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
    phantom calibrate --watts wrote it, otherwise watts that are assumed of a CPU core. See phantom hardware."""


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
    """Ranks that share the model; by default 1, or as many as torchrun or srun started."""

    def rank_count(self) -> int:
        """The number of ranks, of the option or of the external launcher."""
        if self.ranks is not None:
            return self.ranks
        return int((os.environ | slurm_ranks(os.environ)).get("WORLD_SIZE", "1"))


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
    phantom hardware."""
    link_delay: str = "0"
    """How much longer a packet takes one way, such as 1ms; needs a kernel with netem."""
    link_loss: str = "0%"
    """Packets that are lost, such as 0.1%; needs a kernel with netem."""

    def network(self, ranks: int, dtype: str = "fp32") -> Network | None:
        """The network of a launch of ``ranks`` ranks that compute in ``dtype``; None without emulated hosts."""
        from phantom_parallel.cost.links import network_of

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
    """Parse a command's options. ``defaults`` replace those of the class; names that it does not have are ignored."""
    with _printed_once() if launched_externally() else nullcontext():
        return tyro.cli(_described(options, defaults or {}), prog=prog, args=arguments)


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


def _described(options: type[Any], defaults: Mapping[str, Any]) -> type[Any]:
    """A class of the same options, with their help texts, their aliases and with ``defaults``.

    The parser would find the help texts too, but keeps the line breaks of the source.
    """
    assert is_dataclass(options)
    hints, docs = get_type_hints(options, include_extras=True), field_docs(options)
    changed: list[tuple[str, Any, Any]] = []
    for option in fields(options):
        kind, default = hints[option.name], {"default": defaults.get(option.name, option.default)}
        if option.default_factory is not MISSING and option.name not in defaults:
            default = {"default_factory": option.default_factory}
        if option.name in docs:  # innermost, so that a text which the option has already replaces it
            first, *others = get_args(kind) if get_origin(kind) is Annotated else (kind,)
            kind = Annotated[first, tyro.conf.arg(help=docs[option.name]), *others]
        if option.name in ALIASES:
            kind = Annotated[kind, tyro.conf.arg(aliases=ALIASES[option.name])]
        changed.append((option.name, kind, field(**default, kw_only=True)))
    derived = make_dataclass(options.__name__, changed, bases=(options,), frozen=True, kw_only=True)
    derived.__doc__ = options.__doc__
    return derived


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


def folder_of(arguments: list[str]) -> Path | None:
    """Return the value of ``--out`` among arguments that are not parsed yet."""
    value = value_of("--out", arguments)
    return None if value is None else Path(value)


def command_line() -> str:
    """Return the command as the user typed it."""
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
