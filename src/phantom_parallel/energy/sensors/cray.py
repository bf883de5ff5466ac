"""Cray ``pm_counters``: energy of a node's accelerators, CPUs and memory, updated ten times a second.

Each file contains ``VALUE UNIT TIME us``. ``freshness`` increases with each update: readings at the ends of a window
wait for the next one. ``generation`` and ``startup`` change when the counters are reset, which voids a window.
"""

import time
from collections.abc import Callable
from pathlib import Path

from phantom_parallel.energy.results import Component
from phantom_parallel.energy.sensors.base import (
    Clock,
    Discovery,
    EnergySample,
    ReadFailure,
    SensorReading,
    SensorSpec,
    describe_os_error,
)

PM_COUNTERS = Path("/sys/cray/pm_counters")
REMEDY = "these files are world-readable on a Cray by default; ask the site to allow it"
STALL_SECONDS = 1.0  # ten updates
POLL_SECONDS = 0.002


class CraySource:
    """Reads the counters of one directory, all within one update."""

    def __init__(self, root: Path, specs: tuple[SensorSpec, ...], clock: Clock, sleep: Callable[[float], None]) -> None:
        self.specs = specs
        self._root, self._clock, self._sleep = root, clock, sleep

    def read(self, *, fresh: bool = True) -> dict[str, SensorReading]:
        ids = [spec.id for spec in self.specs]
        try:
            if fresh and (stalled := self._wait_for_update()):
                return dict.fromkeys(ids, ReadFailure(stalled))
            # An update between two files would mix old and new values. The next attempt has a tenth of a second.
            for _ in range(3):
                freshness, now = self._word("freshness"), self._clock()
                epoch = f"generation {self._word('generation')}, startup {self._word('startup')}"
                joules = {name: float(self._word(name.split("/", 1)[1])) for name in ids}
                if self._word("freshness") == freshness:
                    break
        except OSError as error:
            path = Path(error.filename or self._root)
            return dict.fromkeys(ids, ReadFailure(describe_os_error(path, error, REMEDY)))
        return {name: EnergySample(now, value, epoch) for name, value in joules.items()}

    def _wait_for_update(self) -> str | None:
        """Return None after an update, or an error message if there is none."""
        before, start = self._word("freshness"), self._clock()
        while self._word("freshness") == before:
            if self._clock() - start > STALL_SECONDS:
                return f"stalled: {self._root / 'freshness'} stayed at {before} for {STALL_SECONDS:g} s"
            self._sleep(POLL_SECONDS)
        return None

    def _word(self, file: str) -> str:
        return (self._root / file).read_text().split()[0]


def probe_cray(
    root: Path = PM_COUNTERS,
    *,
    accelerators: bool = True,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Discovery:
    """Look for pm_counters in the directory ``root``.

    Numbers of ``accelerators`` do not identify torch's devices, so it is all of the node's or none.
    """
    if not (root / "freshness").exists():
        return Discovery()  # no hint: they cannot be installed, they belong to the machine
    hertz = root / "raw_scan_hz"
    resolution = 1 / float(hertz.read_text().split()[0]) if hertz.exists() else 0.1
    wanted = {"cpu_energy": ("CPU", Component.CPU), "memory_energy": ("memory", Component.MEMORY)}
    for path in sorted(root.glob("accel[0-9]*_energy")) if accelerators else ():
        number = path.name.removeprefix("accel").removesuffix("_energy")
        wanted[path.name] = (f"accelerator {number}", Component.GPU)
    specs = tuple(
        SensorSpec(f"cray/{file}", *measures, resolution) for file, measures in wanted.items() if (root / file).exists()
    )
    source = CraySource(root, specs, clock, sleep)
    readings = source.read(fresh=False).values()
    problems = sorted({reading.reason for reading in readings if isinstance(reading, ReadFailure)})
    return Discovery(() if problems else (source,), tuple(problems))
