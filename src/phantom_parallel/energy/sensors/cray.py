"""Cray's pm_counters: a node's own meter, ten times a second, with its accelerators, CPUs and memory beside it.

Each file is ``VALUE UNIT TIME us``. ``energy`` is the node and includes all else, so it has the node's scope and the
others the device's. ``freshness`` rises with each update: a reading at the end of a window waits for a tick, so that it
is not an old one. ``generation`` and ``startup`` change when the counters were set anew, which voids a window.
"""

import re
import time
from collections.abc import Callable, Collection
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

PM_COUNTERS = Path("/sys/cray/pm_counters")
REMEDY = "these files are world-readable on a Cray by default; ask the site to allow it"
SCAN_HZ = 10.0  # where raw_scan_hz is missing
STALL_SECONDS = 1.0  # ten updates without a tick
POLL_SECONDS = 0.002

_ACCELERATOR = re.compile(r"accel(\d+)_energy")


class CraySource:
    """The counters of one folder, read within one update of each other."""

    name = "cray"

    def __init__(
        self,
        root: Path,
        specs: tuple[SensorSpec, ...],
        clock: Clock = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        read: ReadText = read_text,
    ) -> None:
        self.specs = specs
        self._root, self._clock, self._sleep, self._read = root, clock, sleep, read

    def read(self, ids: Collection[str], *, settle: bool = True) -> dict[str, Reading]:
        try:
            if settle and (stalled := self._wait_for_tick()):
                return dict.fromkeys(ids, Failed(stalled))
            return self._read_together(ids)
        except OSError as error:
            path = Path(error.filename or self._root)
            return dict.fromkeys(ids, Failed(unreadable(path, error, REMEDY)))
        except (ValueError, IndexError) as error:
            return dict.fromkeys(ids, Failed(f"{self._root}: not in the format of pm_counters: {error}"))

    def _wait_for_tick(self) -> str | None:
        before, start = self._word("freshness"), self._clock()
        while self._word("freshness") == before:
            if self._clock() - start > STALL_SECONDS:
                return f"stalled: {self._root / 'freshness'} stayed at {before} for {STALL_SECONDS:g} s"
            self._sleep(POLL_SECONDS)
        return None

    def _read_together(self, ids: Collection[str]) -> dict[str, Reading]:
        # An update in the middle would mix old values and new ones; a second attempt has a tenth of a second to itself.
        for _ in range(3):
            tick, now = self._word("freshness"), self._clock()
            epoch = f"generation {self._word('generation')}, startup {self._word('startup')}"
            joules = {name: self._joules(name.split("/", 1)[1]) for name in ids}
            if self._word("freshness") == tick:
                break
        return {name: Sample(now, value, epoch) for name, value in joules.items()}

    def _word(self, file: str) -> str:
        return self._read(self._root / file).split()[0]

    def _joules(self, file: str) -> float:
        value, unit = self._read(self._root / file).split()[:2]
        if unit != "J":
            raise ValueError(f"{file} is in {unit!r}, expected 'J'")
        return float(value)


def find_cray(
    root: Path = PM_COUNTERS,
    *,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    read: ReadText = read_text,
) -> Finding:
    """The counters in ``root``."""
    if not (root / "energy").exists():
        return Finding("cray")  # nothing that one could install: it is part of the machine
    resolution = 1 / _scan_hz(root, read)
    wanted = {"energy": ("node", Part.NODE), "cpu_energy": ("CPU", Part.CPU), "memory_energy": ("memory", Part.MEMORY)}
    for path in sorted(root.glob("accel*_energy")):
        if match := _ACCELERATOR.fullmatch(path.name):
            wanted[path.name] = (f"accelerator {match[1]}", Part.GPU)
    specs = tuple(
        SensorSpec(
            f"cray/{file}",
            label,
            part,
            Scope.NODE if part is Part.NODE else Scope.DEVICE,
            Provenance.COUNTER,
            resolution,
        )
        for file, (label, part) in wanted.items()
        if (root / file).exists()
    )
    source = CraySource(root, specs, clock, sleep, read)
    first = source.read([spec.id for spec in specs], settle=False)
    problems = sorted({reading.reason for reading in first.values() if isinstance(reading, Failed)})
    return Finding("cray", None if problems else source, tuple(problems))


def _scan_hz(root: Path, read: ReadText) -> float:
    try:
        return float(read(root / "raw_scan_hz").split()[0]) or SCAN_HZ
    except (OSError, ValueError, IndexError):
        return SCAN_HZ
