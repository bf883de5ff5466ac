"""Hardware profiles: what a machine can do, as data. A profile is a TOML file in which each figure names its source.

``load_profile`` finds a profile by name, first among the user's files (``$PHANTOM_PROFILES``, or
``~/.config/phantom-parallel/profiles``), then among those shipped; or reads the file at a path. A file may start from
another with ``base = "dgx-a100"`` and override single figures. What the figures mean, as equations: `cost.timing` and
``docs/planning.md``.
"""

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from phantom_parallel.utils.files import read_text, write_text
from phantom_parallel.utils.parsing import choose_from, is_finite

SHIPPED = Path(__file__).parent / "profiles"
WORD_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


class Rule(NamedTuple):
    """What a figure counts, and which values make sense."""

    unit: str
    wanted: str  # one of the keys of _ALLOWED


_ALLOWED = {
    "a positive number": lambda value: value > 0,
    "a number that is not negative": lambda value: value >= 0,
    "a fraction above 0 and at most 1": lambda value: 0 < value <= 1,
    "a fraction from 0 to 1": lambda value: 0 <= value <= 1,
    "a positive whole number": lambda value: value >= 1 and value == int(value),
}

FIGURES = {
    "devices_per_node": Rule("devices", "a positive whole number"),
    "max_devices": Rule("devices", "a positive whole number"),
    "memory_bytes": Rule("B", "a positive number"),
    "memory_bandwidth": Rule("B/s", "a positive number"),
    "write_bandwidth": Rule("B/s", "a positive number"),
    "product_overhead_seconds": Rule("s", "a number that is not negative"),
    "layer_overhead_seconds": Rule("s", "a number that is not negative"),
    "collective_overhead_seconds": Rule("s", "a number that is not negative"),
    "overlap": Rule("", "a fraction from 0 to 1"),
}
WATTS = {
    name: Rule("W", "a number that is not negative") for name in ("compute_watts", "communication_watts", "idle_watts")
}
BY_DTYPE = {"peak": Rule("FLOP/s", "a positive number"), "efficiency": Rule("", "a fraction above 0 and at most 1")}
TIERS = ("inside", "between")
TIER = {
    "latency_seconds": Rule("s", "a number that is not negative"),
    "bandwidth": Rule("B/s", "a positive number"),
}
TEXTS = ("name", "description", "device")
UNAVAILABLE = "unavailable"  # power = "unavailable" stands for the three watts of a machine whose power is unknown


@dataclass(frozen=True)
class Figure:
    """A number with where it comes from. ``uncertain``: assumed, or not checked against its source."""

    value: float
    source: str
    uncertain: bool = False

    def __post_init__(self) -> None:
        if not is_finite(self.value):
            raise ValueError(f"value must be a finite number, got {self.value!r}")
        if not isinstance(self.source, str) or not self.source.strip():
            raise ValueError(f"source must say where the value comes from, got {self.source!r}")
        if not isinstance(self.uncertain, bool):
            raise ValueError(f"uncertain must be true or false, got {self.uncertain!r}")
        object.__setattr__(self, "value", float(self.value))


@dataclass(frozen=True)
class Tier:
    """A level of the network, as one device sees it: the time of a step, and bytes a second in one direction."""

    latency_seconds: Figure
    bandwidth: Figure


@dataclass(frozen=True)
class Profile:
    """A machine. The watts are all there or all None: a machine without them has times, but no energies."""

    name: str
    description: str
    device: str
    devices_per_node: Figure
    max_devices: Figure
    memory_bytes: Figure
    memory_bandwidth: Figure
    write_bandwidth: Figure  # of a product's result: below the memory's where results are memory fresh from the system
    peak: Mapping[str, Figure]  # by dtype
    efficiency: Mapping[str, Figure]  # by dtype: the part of the peak that the largest products reach
    product_overhead_seconds: Figure  # of one matrix product, whatever its size
    layer_overhead_seconds: Figure  # of one layer in one phase, besides its products
    collective_overhead_seconds: Figure  # of one exchange, whatever its size and ranks
    inside: Tier
    between: Tier
    overlap: Figure  # the part of an exchange that products can hide
    compute_watts: Figure | None
    communication_watts: Figure | None
    idle_watts: Figure | None

    def __post_init__(self) -> None:
        for name in TEXTS:
            if not isinstance(getattr(self, name), str) or not getattr(self, name).strip():
                raise ValueError(f"{name} must be a text, got {getattr(self, name)!r}")
        for name, figure, rule in self.figures():
            if not isinstance(figure, Figure):
                raise ValueError(f"{name} must be a figure with value and source, got {figure!r}")
            if not _ALLOWED[rule.wanted](figure.value):
                raise ValueError(f"{name} must be {rule.wanted}, got {figure.value!r}")
        given = [name for name in WATTS if getattr(self, name) is not None]
        if given and len(given) < len(WATTS):
            raise ValueError(f"{', '.join(WATTS)} come together, got only {', '.join(given)}")
        if unknown := sorted(set(self.peak) - set(WORD_BYTES)):
            raise ValueError(f"peak.{unknown[0]} is not a dtype: use {', '.join(WORD_BYTES)}")
        if not self.peak:
            raise ValueError(f"peak must have a figure for at least one dtype of {', '.join(WORD_BYTES)}, got none")
        if odd := sorted(set(self.peak) ^ set(self.efficiency)):
            raise ValueError(f"peak and efficiency must have the same dtypes, and {odd[0]} is in one of them only")
        if self.devices_per_node.value > self.max_devices.value:
            raise ValueError(
                f"devices_per_node must be at most max_devices={self.max_devices.value:.0f}, "
                f"got {self.devices_per_node.value:.0f}"
            )

    def figures(self) -> list[tuple[str, Figure, Rule]]:
        """Every figure with its name in the file and its rule."""
        found = [(name, getattr(self, name), rule) for name, rule in FIGURES.items()]
        for group, rule in BY_DTYPE.items():
            found += [(f"{group}.{dtype}", figure, rule) for dtype, figure in getattr(self, group).items()]
        for tier in TIERS:
            found += [(f"{tier}.{name}", getattr(getattr(self, tier), name), rule) for name, rule in TIER.items()]
        watts = [(name, getattr(self, name), rule) for name, rule in WATTS.items()]
        return found + [watt for watt in watts if watt[1] is not None]

    @property
    def has_power(self) -> bool:
        return self.compute_watts is not None

    def require_dtype(self, dtype: str) -> None:
        if dtype not in self.peak:
            raise ValueError(f"dtype {dtype!r} has no peak in profile {self.name!r}: it has {', '.join(self.peak)}")

    def require_devices(self, devices: int) -> None:
        if devices > self.max_devices.value:
            raise ValueError(
                f"{devices} devices are more than the {self.max_devices.value:.0f} of profile {self.name!r}: "
                f"use at most {self.max_devices.value:.0f}, or raise max_devices in a profile of your own"
            )


def user_directory() -> Path:
    """Where a user's own profiles live, and where calibration writes."""
    chosen = os.environ.get("PHANTOM_PROFILES")
    return Path(chosen) if chosen else Path.home() / ".config" / "phantom-parallel" / "profiles"


def list_profiles() -> dict[str, Path]:
    """Every profile's name and file; a user's own file goes before the shipped one of the same name."""
    return {path.stem: path for folder in (SHIPPED, user_directory()) for path in sorted(folder.glob("*.toml"))}


def load_profile(name_or_path: str | Path) -> Profile:
    """The profile of that name, or in that file."""
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or text.endswith(".toml") or os.sep in text:
        path = Path(name_or_path)
    else:
        path = _find(text, exclude=())
    data = _read(path, seen=())
    try:
        return _profile(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _find(name: str, exclude: tuple[Path, ...]) -> Path:
    for folder in (user_directory(), SHIPPED):
        path = folder / f"{name}.toml"
        if path.is_file() and path.resolve() not in exclude:
            return path
    known = list_profiles()
    hint = " (phantom machine measure writes it)" if name.startswith("this") else ""
    raise ValueError(
        f"there is no profile {name!r}{hint}: {choose_from(name, known)}, or give the path of a .toml file"
    )


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """A file's fields over those of its base. A base is never one of ``seen``: a file may so extend its namesake."""
    try:
        data = tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a TOML file: {error}") from None
    _check_names(path, data)
    data.setdefault("name", path.stem)
    data = {key: _with_source(value, path) for key, value in data.items()}
    base = data.pop("base", None)
    if base is None:
        return data
    if not isinstance(base, str):
        raise ValueError(f"{path}: base must be the name of a profile, got {base!r}")
    seen = (*seen, path.resolve())
    merged = _read(_find(base, exclude=seen), seen)
    if "power" in data:
        merged = {key: value for key, value in merged.items() if key not in WATTS}
    elif any(name in data for name in WATTS):
        merged.pop("power", None)
    for key, value in data.items():
        grouped = key in BY_DTYPE or key in TIERS
        merged[key] = {**merged.get(key, {}), **value} if grouped else value
    return merged


def _check_names(path: Path, data: Mapping[str, Any]) -> None:
    known = (*TEXTS, "base", "power", *FIGURES, *BY_DTYPE, *TIERS, *WATTS)
    for key, value in data.items():
        if key not in known:
            raise ValueError(f"{path}: unknown field {key!r} = {value!r}: {choose_from(key, known)}")
        inner = tuple(WORD_BYTES) if key in BY_DTYPE else tuple(TIER) if key in TIERS else None
        if inner is None:
            continue
        if not isinstance(value, dict):
            raise ValueError(f"{path}: {key} must be a table of {', '.join(inner)}, got {value!r}")
        for name in value:
            if name not in inner:
                raise ValueError(f"{path}: unknown field '{key}.{name}' = {value[name]!r}: {choose_from(name, inner)}")


def _with_source(value: Any, path: Path) -> Any:
    """A bare number is a figure too: a user who overrides one need not explain it to himself."""
    if isinstance(value, dict) and not {"value", "source", "uncertain"} & set(value):
        return {key: _with_source(inner, path) for key, inner in value.items()}
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"value": value, "source": f"given in {path.name}"}
    return value


def _figure(name: str, entry: Any) -> Figure:
    if not isinstance(entry, dict):
        raise ValueError(f'{name} must be a number or {{ value = ..., source = "..." }}, got {entry!r}')
    for key in ("value", "source"):
        if key not in entry:
            raise ValueError(f"{name} lacks {key!r}, got {entry!r}")
    if unknown := sorted(set(entry) - {"value", "source", "uncertain"}):
        raise ValueError(f"{name} has an unknown field {unknown[0]!r}: a figure has value, source and uncertain")
    try:
        return Figure(**entry)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _profile(data: Mapping[str, Any]) -> Profile:
    wanted = [*TEXTS, *FIGURES, *BY_DTYPE, *TIERS]
    if "power" not in data:
        wanted += WATTS
    elif data["power"] != UNAVAILABLE:
        raise ValueError(f"power must be {UNAVAILABLE!r}, or be left out with {', '.join(WATTS)} given")
    elif given := [name for name in WATTS if name in data]:
        raise ValueError(f'{given[0]} is given although power = "{UNAVAILABLE}": remove one of them')
    for name in wanted:
        if name not in data:
            raise ValueError(f"the field {name!r} is missing: give it, or start from a profile with base = ...")
    fields: dict[str, Any] = {name: data[name] for name in TEXTS} | dict.fromkeys(WATTS)
    fields |= {name: _figure(name, data[name]) for name in (*FIGURES, *WATTS) if name in data}
    for group in BY_DTYPE:
        fields[group] = {dtype: _figure(f"{group}.{dtype}", entry) for dtype, entry in data[group].items()}
    for tier in TIERS:
        for name, rule in TIER.items():
            if name not in data[tier]:
                raise ValueError(f"the field '{tier}.{name}' is missing: it must be {rule.wanted} ({rule.unit})")
        fields[tier] = Tier(**{name: _figure(f"{tier}.{name}", data[tier][name]) for name in TIER})
    return Profile(**fields)


def dump_profile(profile: Profile, path: str | Path) -> None:
    """Write a profile as a file that loads back equal. The file appears whole or not at all."""
    lines = [f"{name} = {_text(getattr(profile, name))}" for name in TEXTS]
    if not profile.has_power:
        lines.append(f"power = {_text(UNAVAILABLE)}")
    section = ""
    flat = [entry for entry in profile.figures() if "." not in entry[0]]
    for name, figure, _ in flat + [entry for entry in profile.figures() if "." in entry[0]]:
        group, _, key = name.rpartition(".")
        if group != section:
            lines += ["", f"[{group}]"]
            section = group
        mark = ", uncertain = true" if figure.uncertain else ""
        lines.append(f"{key} = {{ value = {figure.value!r}, source = {_text(figure.source)}{mark} }}")
    write_text(path, "\n".join(lines) + "\n")


def _text(text: str) -> str:
    """A TOML string: JSON's escapes are TOML's too, but for the one control character that JSON leaves as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
