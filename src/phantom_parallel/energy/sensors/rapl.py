"""Intel and AMD RAPL through Linux powercap: one counter for each CPU package, and one for its memory where it has one.

    intel-rapl:0      package-0   counted
    intel-rapl:0:0    core        inside the package: left out
    intel-rapl:0:1    uncore      inside the package: left out
    intel-rapl:0:2    dram        beside the package: counted
    intel-rapl:1      psys        the platform, packages included: node scope, so never added to them

``energy_uj`` runs from 0 to ``max_energy_range_uj`` and starts again. intel-rapl-mmio shows the same packages by
another way and is left out.
"""

import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from phantom_parallel.energy.readings import Part, Provenance, Scope
from phantom_parallel.energy.sensors.base import (
    Clock,
    Failed,
    Finding,
    Reading,
    ReadText,
    Sample,
    SensorSpec,
    read_text,
    unreadable,
)

POWERCAP = Path("/sys/class/powercap")
REMEDY = "reading RAPL is root's by default; allow it with: sudo chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj"
RESOLUTION = 0.001  # seconds: the registers are updated about every millisecond
# More than any package draws. A counter that fell is a wrap if the energy this implies is possible, a reset if it is
# not; and it must be read again before this power could have wrapped it twice.
PLAUSIBLE_WATTS = 2000.0

_ZONE = re.compile(r"intel-rapl:\d+(:\d+)?")


@dataclass
class _Zone:
    spec: SensorSpec
    file: Path
    range_uj: int
    last_uj: int
    last_seconds: float
    total_uj: int = 0  # with the wraps undone
    epoch: str = "steady count"

    def advance(self, now_uj: int, now: float) -> None:
        elapsed = now - self.last_seconds
        moved = now_uj - self.last_uj
        if moved < 0:
            moved += self.range_uj
            if moved > PLAUSIBLE_WATTS * 1e6 * max(elapsed, RESOLUTION):
                self.epoch = f"reset: from {self.last_uj} to {now_uj} uJ within {elapsed:.3g} s at {now:.3f}"
        if self.spec.horizon_seconds is not None and elapsed > self.spec.horizon_seconds:
            self.epoch = f"unread for {elapsed:.3g} s at {now:.3f}: it may have wrapped more than once"
        self.total_uj += moved
        self.last_uj, self.last_seconds = now_uj, now


class RaplSource:
    """The zones of one powercap tree."""

    name = "rapl"

    def __init__(self, zones: list[_Zone], clock: Clock, read: ReadText) -> None:
        self._zones = {zone.spec.id: zone for zone in zones}
        self._clock, self._read = clock, read
        self.specs = tuple(zone.spec for zone in zones)

    def read(self, ids: Collection[str], *, settle: bool = True) -> dict[str, Reading]:
        readings: dict[str, Reading] = {}
        for name in ids:
            zone = self._zones[name]
            try:
                zone.advance(int(self._read(zone.file)), self._clock())
            except OSError as error:
                readings[name] = Failed(unreadable(zone.file, error, REMEDY))
            except ValueError as error:
                readings[name] = Failed(f"{zone.file}: {error}")
            else:
                readings[name] = Sample(zone.last_seconds, zone.total_uj / 1e6, zone.epoch)
        return readings


def find_rapl(root: Path = POWERCAP, *, clock: Clock = time.perf_counter, read: ReadText = read_text) -> Finding:
    """The RAPL zones under ``root``."""
    folders = sorted(path for path in root.glob("intel-rapl:*") if _ZONE.fullmatch(path.name))
    if not folders:
        hint = (
            f"CPU and memory: no RAPL zones in {root}; on a physical Intel or AMD machine with Linux load them with "
            "'sudo modprobe intel_rapl_msr' (virtual machines seldom have them)"
        )
        return Finding("rapl", hints=(hint,))
    zones, problems = [], []
    for folder in folders:
        try:
            zone = _open(folder, clock, read)
        except OSError as error:
            problems.append(unreadable(Path(error.filename or folder), error, REMEDY))
        except ValueError as error:
            problems.append(f"{folder}: {error}")
        else:
            zones += [] if zone is None else [zone]
    return Finding("rapl", RaplSource(zones, clock, read) if zones else None, tuple(problems))


def _open(folder: Path, clock: Clock, read: ReadText) -> _Zone | None:
    """The zone of a folder; None for one inside another."""
    name = read(folder / "name").strip()
    part, scope = Part.CPU, Scope.DEVICE
    if name == "dram":
        part = Part.MEMORY
    elif name == "psys":
        part, scope = Part.NODE, Scope.NODE
    elif not name.startswith("package"):
        return None
    file = folder / "energy_uj"
    try:
        first = int(read(file))
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(file)) from None
    if first == 0:
        raise ValueError("energy_uj reads 0: this zone does not count")
    range_uj = int(read(folder / "max_energy_range_uj"))
    if range_uj <= 0:
        raise ValueError(f"max_energy_range_uj must be above 0, got {range_uj}")
    number = folder.name.split(":")[1]
    label = f"memory of package {number}" if part is Part.MEMORY else "platform (psys)" if name == "psys" else name
    horizon = range_uj / 1e6 / PLAUSIBLE_WATTS
    spec = SensorSpec(f"rapl/{folder.name}", label, part, scope, Provenance.COUNTER, RESOLUTION, horizon)
    return _Zone(spec, file, range_uj, first, clock())
