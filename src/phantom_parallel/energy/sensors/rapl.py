"""Intel and AMD RAPL through Linux powercap: a counter for each CPU package, and one for its memory where present.

    intel-rapl:0      package-0   counted
    intel-rapl:0:0    core        part of the package: left out, as is uncore
    intel-rapl:0:2    dram        not part of the package: counted
    intel-rapl:1      psys        the platform including the packages: left out

``energy_uj`` counts from 0 to ``max_energy_range_uj`` and wraps. intel-rapl-mmio is another interface to the same
packages and is left out.
"""

import re
import time
from dataclasses import dataclass
from pathlib import Path

from phantom_parallel.energy.results import Component
from phantom_parallel.energy.sensors.base import (
    Clock,
    CounterSource,
    Discovery,
    EnergySample,
    SensorSpec,
    describe_os_error,
)

POWERCAP = Path("/sys/class/powercap")
REMEDY = "only root can read RAPL by default; allow it with: sudo chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj"
RESOLUTION = 0.001  # seconds: the registers are updated about every millisecond
# More than any package draws. A counter that fell has wrapped if the energy that this implies is possible at this
# power, and was reset if not. A counter must be read again before this power could wrap it twice.
PLAUSIBLE_WATTS = 2000.0

_ZONE = re.compile(r"intel-rapl:\d+(:\d+)?")


@dataclass
class _Zone:
    spec: SensorSpec
    file: Path
    range_uj: int
    last_uj: int
    last_seconds: float
    total_uj: int = 0  # with wraps undone
    epoch: str = "uninterrupted"

    def read(self, now: float) -> EnergySample:
        now_uj, elapsed = int(self.file.read_text()), now - self.last_seconds
        used_uj = now_uj - self.last_uj
        if used_uj < 0:
            used_uj += self.range_uj
            if used_uj > PLAUSIBLE_WATTS * 1e6 * max(elapsed, RESOLUTION):
                self.epoch = f"reset: from {self.last_uj} to {now_uj} uJ within {elapsed:.3g} s at {now:.3f}"
        if self.spec.max_unread_seconds is not None and elapsed > self.spec.max_unread_seconds:
            self.epoch = f"unread for {elapsed:.3g} s at {now:.3f}: it may have wrapped more than once"
        self.total_uj += used_uj
        self.last_uj, self.last_seconds = now_uj, now
        return EnergySample(now, self.total_uj / 1e6, self.epoch)


def probe_rapl(root: Path = POWERCAP, *, clock: Clock = time.perf_counter) -> Discovery:
    """Look for RAPL zones in the directory ``root``."""
    folders = sorted(path for path in root.glob("intel-rapl:*") if _ZONE.fullmatch(path.name))
    if not folders:
        hint = (
            f"CPU and memory: no RAPL zones in {root}; on a physical Intel or AMD machine with Linux load them with "
            "'sudo modprobe intel_rapl_msr' (virtual machines rarely have them)"
        )
        return Discovery(hints=(hint,))
    zones, problems = [], []
    for folder in folders:
        try:
            if zone := _open(folder, clock):
                zones.append(zone)
        except OSError as error:
            problems.append(describe_os_error(Path(error.filename or folder), error, REMEDY))
        except ValueError as error:
            problems.append(f"{folder}: {error}")
    source = CounterSource({zone.spec: zone.read for zone in zones}, (OSError, ValueError), clock)
    return Discovery((source,) if zones else (), tuple(problems))


def _open(folder: Path, clock: Clock) -> _Zone | None:
    """Open the zone of a directory; None if it is part of another zone, or includes others."""
    name = (folder / "name").read_text().strip()
    if name.startswith("package"):
        measures = name, Component.CPU
    elif name == "dram":
        measures = f"memory of package {folder.name.split(':')[1]}", Component.MEMORY
    else:
        return None
    file = folder / "energy_uj"
    first = int(file.read_text())
    if first == 0:
        raise ValueError("energy_uj reads 0: this zone does not count")
    range_uj = int((folder / "max_energy_range_uj").read_text())
    spec = SensorSpec(f"rapl/{folder.name}", *measures, RESOLUTION, range_uj / 1e6 / PLAUSIBLE_WATTS)
    return _Zone(spec, file, range_uj, first, clock())
