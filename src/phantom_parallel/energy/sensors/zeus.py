"""Whatever else Zeus can measure (Apple silicon, Jetson boards, CPUs through its daemon), for the parts of this machine
that no sensor of ours covers.

Zeus measures windows. A running total is made of windows that follow each other: a reading ends one and begins the
next.
"""

import importlib
import importlib.util
import time
from collections.abc import Collection
from typing import Any

from phantom_parallel.energy.readings import Part, Provenance, Scope
from phantom_parallel.energy.sensors.base import Clock, Failed, Finding, Reading, Sample, SensorSpec
from phantom_parallel.energy.sensors.visible import physical_index

RESOLUTION = 0.1  # seconds: Zeus does not say; that of the slowest counter that it reads
INSTALL = "anything else, such as Apple silicon: pip install zeus (about 400 MB with what it needs)"
_WINDOW = "phantom_parallel"
# A system on a chip reports in millijoules; only the parts that do not contain each other.
_CHIP = {"cpu_total_mj": Part.CPU, "gpu_mj": Part.GPU, "dram_mj": Part.MEMORY, "ane_mj": Part.OTHER}


class ZeusSource:
    """One ZeusMonitor."""

    name = "zeus"

    def __init__(self, monitor: Any, specs: tuple[SensorSpec, ...], clock: Clock) -> None:
        self.specs = specs
        self._monitor, self._clock = monitor, clock
        self._totals = {spec.id: 0.0 for spec in specs}
        self._begin()

    def read(self, ids: Collection[str], *, settle: bool = True) -> dict[str, Reading]:
        try:
            measured = _by_id(self._monitor.end_window(_WINDOW, sync_execution=False))
            now = self._clock()
            self._begin()
        except Exception as error:  # Zeus has an exception class for each of its back ends, and no common one
            return dict.fromkeys(ids, Failed(f"Zeus: {error}"))
        for name in self._totals:
            self._totals[name] += measured.get(name, (Part.OTHER, 0.0))[1]
        return {name: Sample(now, self._totals[name]) for name in ids}

    def _begin(self) -> None:
        self._monitor.begin_window(_WINDOW, sync_execution=False)  # the meter has synchronised already


def find_zeus(covered: Collection[Part], *, zeus: Any = None, clock: Clock = time.perf_counter) -> Finding:
    """What Zeus measures beside the parts in ``covered``. ``zeus`` is the module ``zeus.monitor`` to use."""
    if zeus is None:
        if importlib.util.find_spec("zeus") is None:
            return Finding("zeus", hints=(INSTALL,))
        try:
            zeus = importlib.import_module("zeus.monitor")
        except Exception as error:  # whatever its many dependencies raise
            return Finding("zeus", problems=(f"Zeus is installed but does not load: {error}",))
    try:
        monitor = zeus.ZeusMonitor(
            gpu_indices=[] if Part.GPU in covered else None,
            cpu_indices=[] if Part.CPU in covered else None,
        )
        monitor.begin_window(_WINDOW, sync_execution=False)
        offered = _by_id(monitor.end_window(_WINDOW, sync_execution=False))
    except Exception as error:
        return Finding("zeus", problems=(f"Zeus does not start: {error}",))
    specs = tuple(
        SensorSpec(name, f"{name.split('/')[1]} (Zeus)", part, Scope.DEVICE, _kind(monitor, name), RESOLUTION)
        for name, (part, _) in offered.items()
        if part not in covered
    )
    return Finding("zeus", ZeusSource(monitor, specs, clock) if specs else None)


def _kind(monitor: Any, name: str) -> Provenance:
    """Zeus samples power, without saying so in its results, where a GPU has no energy counter."""
    sampled = getattr(monitor, "power_monitor", None) is not None
    return Provenance.INTEGRATED_POWER if sampled and name.startswith("zeus/gpu ") else Provenance.COUNTER


def _by_id(measurement: Any) -> dict[str, tuple[Part, float]]:
    """Joules of each part, by sensor id."""
    found: dict[str, tuple[Part, float]] = {}
    for index, joules in (measurement.gpu_energy or {}).items():
        found[f"zeus/gpu {physical_index(index)}"] = (Part.GPU, joules)
    for index, joules in (measurement.cpu_energy or {}).items():
        found[f"zeus/cpu {index}"] = (Part.CPU, joules)
    for index, joules in (measurement.dram_energy or {}).items():
        found[f"zeus/memory {index}"] = (Part.MEMORY, joules)
    chip = getattr(measurement, "soc_energy", None)
    for field, part in _CHIP.items():
        if (millijoules := getattr(chip, field, None)) is not None:
            found[f"zeus/chip {field.removesuffix('_mj')}"] = (part, millijoules / 1e3)
    return found
