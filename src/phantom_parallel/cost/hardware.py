"""Hardware profiles: what a machine can do, as data. A profile is a TOML file in which each figure names its source.

``load_profile`` finds a profile by name, first among the user's files (``$PHANTOM_PROFILES``, or
``~/.config/phantom-parallel/profiles``), then among those shipped; or reads the file at a path. A file may start from
another with ``base = "dgx-a100"`` and override single figures. What the figures mean, as equations: `cost.timing` and
``docs/planning.md``.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from msgspec import Meta

from phantom_parallel.utils.files import read_text, write_text
from phantom_parallel.utils.parsing import check_keys, choose_from, convert, decode_toml

SHIPPED = Path(__file__).parent / "profiles"
WORD_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}

Positive = Annotated[float, Meta(gt=0, lt=1e300)]
NotNegative = Annotated[float, Meta(ge=0, lt=1e300)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
Count = Annotated[int, Meta(ge=1)]
V = TypeVar("V", bound=float)


@dataclass(frozen=True)
class Figure(Generic[V]):
    """A number with where it comes from. ``uncertain``: assumed, or not checked against its source."""

    value: V
    source: Annotated[str, Meta(min_length=1)]
    uncertain: bool = False


@dataclass(frozen=True)
class Tier:
    """A level of the network, as one device sees it: the time of a step, and bytes a second in one direction; of each
    exchange, ``burst_bytes`` pass at once, as on a link that was idle and whose rate a token bucket limits.
    """

    latency_seconds: Figure[NotNegative]
    bandwidth: Figure[Positive]
    burst_bytes: Figure[NotNegative] = Figure(0.0, "no burst")


@dataclass(frozen=True)
class Profile:
    """A machine. The watts are all there or all None: a machine without them has times, but no energies."""

    name: str
    description: str
    device: str
    devices_per_node: Figure[Count]
    max_devices: Figure[Count]
    memory_bytes: Figure[Positive]
    memory_bandwidth: Figure[Positive]
    write_bandwidth: Figure[Positive]  # of a product's result: below the memory's where results are fresh memory
    peak: Mapping[str, Figure[Positive]]  # by dtype
    efficiency: Mapping[str, Figure[Fraction]]  # by dtype: the part of the peak that the largest products reach
    product_overhead_seconds: Figure[NotNegative]  # of one matrix product, whatever its size
    layer_overhead_seconds: Figure[NotNegative]  # of one layer in one phase, besides its products
    collective_overhead_seconds: Figure[NotNegative]  # of one exchange, whatever its size and ranks
    inside: Tier
    between: Tier
    overlap: Figure[Annotated[float, Meta(ge=0, le=1)]]  # the part of an exchange that products can hide
    compute_watts: Figure[NotNegative] | None = None
    communication_watts: Figure[NotNegative] | None = None
    idle_watts: Figure[NotNegative] | None = None

    def __post_init__(self) -> None:
        if len({getattr(self, name) is None for name in WATTS}) > 1:
            raise ValueError(f"{', '.join(WATTS)} come together: give all of them or none")
        if not self.peak or set(self.peak) != set(self.efficiency):
            dtypes = f"{sorted(self.peak)} and {sorted(self.efficiency)}"
            raise ValueError(f"peak and efficiency must have the same dtypes, got {dtypes}")

    def figures(self) -> list[tuple[str, Figure[Any], str]]:
        """Every figure with its name in the file and its unit, those of groups last."""
        flat = {name: value for name, value in vars(self).items() if isinstance(value, Figure)}
        for group in GROUPS:
            values = getattr(self, group)
            members = vars(values) if isinstance(values, Tier) else values
            flat |= {f"{group}.{name}": figure for name, figure in members.items()}
        words = {name: name.replace(".", "_").split("_") for name in flat}
        units = {name: next((unit for word, unit in _UNITS.items() if word in words[name]), "") for name in flat}
        return [(name, figure, units[name]) for name, figure in flat.items()]

    @property
    def has_power(self) -> bool:
        return self.compute_watts is not None

    def require_dtype(self, dtype: str) -> None:
        if dtype not in self.peak:
            raise ValueError(f"dtype {dtype!r} has no peak in profile {self.name!r}: it has {', '.join(self.peak)}")

    def require_devices(self, devices: int) -> None:
        if devices > (most := self.max_devices.value):
            raise ValueError(f"devices={devices} is more than max_devices of profile {self.name!r}: use at most {most}")


WATTS = ("compute_watts", "communication_watts", "idle_watts")
GROUPS = {"peak": WORD_BYTES, "efficiency": WORD_BYTES, "inside": Tier.__annotations__, "between": Tier.__annotations__}
_UNITS = {"bytes": "B", "bandwidth": "B/s", "seconds": "s", "watts": "W", "peak": "FLOP/s"}


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
    is_path = isinstance(name_or_path, Path) or text.endswith(".toml") or os.sep in text
    path = Path(name_or_path) if is_path else _find(text, exclude=())
    return convert(_read(path, seen=()), Profile, str(path))


def _find(name: str, exclude: tuple[Path, ...]) -> Path:
    for folder in (user_directory(), SHIPPED):
        path = folder / f"{name}.toml"
        if path.is_file() and path.resolve() not in exclude:
            return path
    hint = " (phantom machine measure writes it)" if name.startswith("this") else ""
    nearest = choose_from(name, list_profiles())
    raise ValueError(f"there is no profile {name!r}{hint}: {nearest}, or give the path of a .toml file")


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """A file's fields over those of its base. A base is never one of ``seen``: a file may so extend its namesake."""
    data = decode_toml(read_text(path), str(path))
    check_keys(data, ["base", "power", *Profile.__annotations__], str(path))
    for group, known in GROUPS.items():
        if isinstance(data.get(group), dict):
            check_keys(data[group], known, f"{path}: {group}")
    own = {"name": path.stem} | {key: _with_source(value, path) for key, value in data.items()}
    base, power = own.pop("base", None), own.pop("power", None)
    if power not in (None, "unavailable"):
        raise ValueError(f"{path}: power must be 'unavailable', or be left out with {', '.join(WATTS)}, got {power!r}")
    if base is None:
        return own
    seen = (*seen, path.resolve())
    merged = _read(_find(str(base), exclude=seen), seen)
    if power is not None:
        merged = {key: value for key, value in merged.items() if key not in WATTS}
    for key, value in own.items():
        merged[key] = {**merged.get(key, {}), **value} if key in GROUPS and isinstance(value, dict) else value
    return merged


def _with_source(value: Any, path: Path) -> Any:
    """A bare number is a figure too: a user who overrides one need not explain it to himself."""
    if isinstance(value, dict) and not {"value", "source", "uncertain"} & set(value):
        return {key: _with_source(inner, path) for key, inner in value.items()}
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"value": value, "source": f"given in {path.name}"}
    return value


def dump_profile(profile: Profile, path: str | Path) -> None:
    """Write a profile as a file that loads back equal. The file appears whole or not at all."""
    values = {key: json.dumps(getattr(profile, key), ensure_ascii=False) for key in ("name", "description", "device")}
    for name, figure, _ in profile.figures():
        mark = ", uncertain = true" if figure.uncertain else ""
        source = json.dumps(figure.source, ensure_ascii=False)
        values[name] = f"{{ value = {figure.value!r}, source = {source}{mark} }}"
    write_text(path, "".join(f"{name} = {value}\n" for name, value in values.items()))
