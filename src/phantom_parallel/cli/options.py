"""Options that several commands share, with one name and one help text, and the parser of options."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import MISSING, asdict, dataclass, field, fields, make_dataclass
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

import tyro
from rich.box import SIMPLE
from rich.table import Table

from phantom_parallel.distributed import launchers
from phantom_parallel.distributed.launchers import external_ranks, launched_externally
from phantom_parallel.families.registry import DEFAULT_FAMILY, family_names, get_family
from phantom_parallel.utils.files import read_json, read_text
from phantom_parallel.utils.network import Network
from phantom_parallel.utils.parsing import choose_from, decode_toml, field_docs
from phantom_parallel.utils.settings import Setting
from phantom_parallel.utils.strategies import WireFormat

if TYPE_CHECKING:
    from phantom_parallel.cost.planner import ModelSizes

T = TypeVar("T")
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]

# Groups of a command's help after its own options, in order, and the options in each.
GROUPS = {
    "model": "width depth in_features out_features activation bias dim layers heads kv_heads hidden "
    "hidden_groups context vocab tie_embeddings parallel_block ladder blocks ghosts low_rank",
    "data": "data batch batch_per_rank samples samples_per_rank grid feature_order data_seed teacher_blocks "
    "teacher_ghosts teacher_depth pattern max_bytes tokenizer eval_windows",
    "ranks": "strategy ranks pp dp device timeout wire micro_batches reshard_after_forward fsdp interleave "
    "activation_checkpointing compile tf32",
    "optimizer": "gradient_accumulation_steps steps target_loss optimizer lr schedule warmup momentum "
    "weight_decay max_grad_norm lr_local lr_compress lr_decompress dtype seed",
    "search": "learning_rates search_steps search_seed search_extend search_micro_batches search_interleave "
    "search_wires",
    "checkpoints": "resume checkpoint_every keep",
    "output": "out json report_only log_every eval_every tracker profile",
    "emulated_hosts": "hosts link hosts_optional",
}
_MAX_UNGROUPED = 12  # options of a command whose help is one group


@dataclass(frozen=True, kw_only=True)
class JsonOption:
    """The option ``--json``."""

    json: Flag = False
    """Print the results as JSON."""


@dataclass(frozen=True, kw_only=True)
class WireOption:
    """The option ``--wire`` of commands that run or count a model on ranks."""

    wire: WireFormat = "full"
    """Format in which activations, ghosts and their gradients are sent between ranks that share a model: as they are
    (full), bf16, or int8 with one scale per row. Products and sums keep their precision."""


@dataclass(frozen=True, kw_only=True)
class Tf32Option:
    """The option ``--tf32`` of commands that train or measure."""

    tf32: Flag = False
    """Multiply fp32 matrices on accelerators in TensorFloat-32: faster, and with 10 bits of mantissa."""


@dataclass(frozen=True, kw_only=True)
class RanksOption:
    """The option ``--ranks`` of commands that run a trained model."""

    ranks: int | None = None
    """Ranks that share the model; by default 1, or as many as the launcher (torchrun, srun, mpirun, ...) started."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Options of commands that launch ranks: device, emulated hosts, their links, and how long exchanges may take."""

    device: str = "auto"
    """Device of each rank: cpu, cuda, xpu, ..., of which there must be one for each rank of a host; auto uses them if
    there are enough, and the CPU otherwise."""
    hosts: int | None = None
    """Number of emulated hosts that the ranks are spread over: network namespaces on this machine, with loopback inside
    a host and --link between hosts. By default all ranks share loopback."""
    link: str | None = None
    """Rate of each host's link, as tc writes it: 100mbit, 1gbit, none. like:PROFILE measures the FLOP/s of a rank and
    chooses the rate at which it has the FLOP-to-byte ratio of a device of that machine between its nodes, and
    inside a host that of the links inside a node; like:PROFILE:inside has the latter between hosts. Profiles: see
    phantom machine show."""
    timeout: float = 60.0
    """Seconds that a rank waits for another one in an exchange. After that, the rank that did not answer is named, and
    all are stopped."""

    @contextmanager
    def launching(self, ranks: int, dtype: str = "fp32", *, announces: bool = True) -> Iterator[Network | None]:
        """Launches inside this block run on the network of the options, which it returns, and with their timeout."""
        from phantom_parallel.cost.calibrate import network_of
        from phantom_parallel.distributed.launch import launch_defaults

        if not 1 <= self.timeout <= 1e6:
            raise ValueError(f"timeout must be from 1 to 1,000,000 seconds, got {self.timeout:g}")
        network = network_of(self.hosts, self.link, ranks, dtype=dtype)
        tf32, timeout = getattr(self, "tf32", False), timedelta(seconds=self.timeout)
        with launch_defaults(timeout, network, self.device, tf32=tf32, announces=announces):
            yield network


def parse(options: type[Any], prog: str, arguments: list[str], defaults: Mapping[str, Any] | None = None) -> Any:
    """Parse a command's options into its dataclass. ``defaults`` replace those of the class."""
    own = [option for option in fields(options) if option.init]
    hints, docs, given = get_type_hints(options, include_extras=True), field_docs(options), defaults or {}
    members: dict[str, list[tuple[str, Any, Any]]] = {"": [], **{group: [] for group in GROUPS}}
    for option in own:
        group = next((group for group, names in GROUPS.items() if option.name in names.split()), "")
        default = {"default": given.get(option.name, option.default), "default_factory": option.default_factory}
        default.pop("default_factory" if default["default"] is not MISSING else "default")
        kind = _described(hints[option.name], docs.get(option.name), default.get("default", MISSING))
        member = (option.name, kind, field(kw_only=True, **default))
        members[group if len(own) > _MAX_UNGROUPED else ""].append(member)
    for group in GROUPS:
        if len(members[group]) < 2:  # no group of its own
            members[""] += members.pop(group)
    ungrouped = members.pop("")
    groups = {  # their names are not those of options, such as --model
        f"{group}_group": Annotated[make_dataclass(group, held, frozen=True), tyro.conf.arg(name=group)]
        for group, held in members.items()
    }
    parser = make_dataclass(options.__name__, [*ungrouped, *((name, kind, field()) for name, kind in groups.items())])
    parser.__doc__ = options.__doc__
    with _printed_once() if launched_externally() else nullcontext():
        parsed: Any = tyro.cli(parser, prog=prog, args=arguments, config=(tyro.conf.OmitArgPrefixes,))
    values = {key: value for name in groups for key, value in vars(getattr(parsed, name)).items()}
    return options(**values, **{name: getattr(parsed, name) for name, _, _ in ungrouped})


def _described(kind: Any, text: str | None, default: Any) -> Any:
    """An option's type with its help. ``INT`` stands for the value of an optional number, not ``{None}|INT``."""
    first, *others = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    members = [get_args(member)[0] if get_origin(member) is Annotated else member for member in get_args(first)]
    optional = type(None) in members and len(members) == 2 and isinstance(members[0], type)
    metavar, hint = members[0].__name__.upper() if optional else None, "" if default is None else None
    shown = tyro.conf.arg(help=text, metavar=metavar, help_behavior_hint=hint)
    return Annotated[first, shown, *others]  # innermost, so that a text which the option has already replaces it


@contextmanager
def _printed_once() -> Iterator[None]:
    """Print the help or an error of the parser once on each host."""
    text = StringIO()
    try:
        with redirect_stdout(text), redirect_stderr(text):
            yield
    except SystemExit as leaving:
        if launchers.reports_error() if leaving.code else launchers.is_local_rank_zero():
            print(text.getvalue(), end="", file=sys.stderr if leaving.code else sys.stdout)
        raise


def value_of(option: str, arguments: list[str]) -> str | None:
    """Return the value of an option such as ``--out`` among arguments that are not parsed yet."""
    for index, argument in enumerate(arguments):
        if argument == option and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2]
    return None


def ranks_of_launcher(arguments: list[str], dp: int = 1, pp: int = 1) -> dict[str, int]:
    """The default of ``--ranks`` where another launcher has started the ranks: their number over dp and pp."""
    if not launched_externally() or value_of("--ranks", arguments):
        return {}
    given = value_of("--dp", arguments) or str(dp), value_of("--pp", arguments) or str(pp)
    copies = math.prod(int(count) if count.isdigit() else 0 for count in given)
    return {"ranks": max(1, external_ranks() // copies)} if copies else {}


def make_options(base: type[Any], settings: Mapping[str, Setting], text: str, /, **attributes: Any) -> type[Any]:
    """The options of ``base`` with one for each setting, ``text`` as the help, and ``attributes`` of the class."""
    made = []
    for name, (kind, default, doc) in settings.items():
        described = Annotated[kind, tyro.conf.arg(help=doc)]  # type: ignore[valid-type]
        made.append((name, described, field() if default is MISSING else field(default=default)))
    space = {"__doc__": text, "__module__": base.__module__} | attributes
    return make_dataclass("Options", made, bases=(base,), namespace=space, frozen=True, kw_only=True)


def config_of(options: Any, config_class: type[T], **changes: Any) -> T:
    """The config among the options of a command, with other values of some settings."""
    settings = {field.name: getattr(options, field.name) for field in fields(config_class)}  # type: ignore[arg-type]
    if settings.get("ranks", 1) is None:
        settings["ranks"] = external_ranks()
    return config_class(**settings | changes)


def other_families(command: str, family: str) -> str:
    """Where the options of a command for other families are."""
    return ", ".join(f"phantom {command} {name} --help" for name in family_names() if name != family)


def make_table(headings: Sequence[str], *, left: int = 1, **settings: Any) -> Table:
    """A table without a frame: the first ``left`` columns have texts, and the others numbers, aligned to the right."""
    defaults: dict[str, Any] = {"box": SIMPLE, "padding": (0, 1, 0, 0), "show_edge": False, "pad_edge": False}
    table = Table(**defaults | settings)
    for number, heading in enumerate(headings):
        place: Any = {"overflow": "fold"} if number < left else {"justify": "right", "no_wrap": True}
        table.add_column(heading, **place)
    return table


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of a command on models of any family."""

    family: ClassVar[str]
    sizes: ClassVar[tuple[str, ...]]  # names of the options that are sizes of the model
    fixed: ClassVar[dict[str, Any]]  # settings of the model that are no options

    like: str | None = None
    """A well-known model, such as llama-3.1-8b, whose sizes are the defaults of the options."""
    model: Path | None = None
    """The same from the config.json of a folder: a model of ours, or a Llama, Mistral or Qwen2 of Hugging Face."""

    @property
    def model_sizes(self) -> "ModelSizes":
        """The sizes of the model."""
        from phantom_parallel.cost.planner import ModelSizes

        return ModelSizes(self.family, self.fixed | {name: getattr(self, name) for name in self.sizes})


def model_defaults(family: str | None, arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """The family and the sizes of the model that ``--like`` or ``--model`` names; by default no sizes."""
    from phantom_parallel.checkpoint.model import CONFIG, FORMAT, read_config
    from phantom_parallel.cost.planner import MODELS, Layout

    name, folder = value_of("--like", arguments), value_of("--model", arguments)
    settings: dict[str, Any] = {}
    own = family or DEFAULT_FAMILY
    if name is not None and folder is not None:
        raise ValueError("--like and --model both name a model: leave one out")
    if name is not None:
        known = decode_toml(read_text(MODELS), str(MODELS))
        if name not in known:
            raise ValueError(f"there is no model {name!r}: {choose_from(name, known)}")
        settings = {key: value for key, value in known[name].items() if key not in ("family", "source")}
        own = known[name]["family"]
    elif folder is not None:
        described = read_json(Path(folder) / CONFIG)
        readers = filter(None, (get_family(each).pretrained_config for each in family_names()))
        config = read_config(folder) if described.get("format") == FORMAT else next(readers)(described, Path(folder))
        settings = {key: value for key, value in asdict(config).items() if isinstance(value, int | str)}
        own, settings = config.family, {key: settings[key] for key in settings.keys() - set(Layout._fields)}
    if family not in (None, own):
        raise ValueError(f"{name or folder} is a model of the family {own}, not {family}: leave out {family}")
    return own, settings


def with_sizes(
    base: type[ModelOptions], family: str, command: str, settings: Mapping[str, Any], **choices: tuple[Any, Any]
) -> type[Any]:
    """The options of ``base`` with the sizes of a family's models, and with another type and default of ``choices``.
    Of the ``settings`` of a model, those that are no options are fixed.
    """
    from phantom_parallel.cost.planner import Layout

    chosen, own = get_family(family), (*Layout._fields, *base.__dataclass_fields__)
    sizes = {name: setting for name, setting in chosen.shape.settings().items() if setting.doc and name not in own}
    docs = field_docs(base)
    chosen_here = {name: Setting(kind, default, docs[name]) for name, (kind, default) in choices.items()}
    end = f"These are the options for {chosen.title}; for others: {other_families(command, family)}."
    text = f"{(base.__doc__ or '').rstrip()}\n\n    {end}\n"
    fixed = {name: value for name, value in settings.items() if name not in sizes}
    return make_options(base, sizes | chosen_here, text, family=family, sizes=tuple(sizes), fixed=fixed)
