"""Sensors through Zeus (Apple silicon, Jetson boards, CPUs through its daemon), for components of this machine that no
other source covers.

Zeus measures windows. The running total is the sum of consecutive windows: a reading ends one and begins the next.
"""

import importlib
import importlib.util
import time
from collections.abc import Collection
from typing import Any

from phantom_parallel.energy.results import Component, Provenance, Scope
from phantom_parallel.energy.sensors.base import (
    Clock,
    EnergySample,
    ProbeResult,
    ReadFailure,
    SensorReading,
    SensorSpec,
)
from phantom_parallel.energy.sensors.visible_devices import physical_index

RESOLUTION = 0.1  # seconds: Zeus does not report it; that of its slowest counter
INSTALL = "anything else, such as Apple silicon: pip install zeus (about 400 MB with what it needs)"
_WINDOW = "phantom_parallel"
# Fields that a system on a chip reports, in millijoules. Only those that do not include each other.
_CHIP = {"cpu_total_mj": Component.CPU, "gpu_mj": Component.GPU, "dram_mj": Component.MEMORY, "ane_mj": Component.OTHER}


class ZeusSource:
    """Reads one ZeusMonitor."""

    name = "zeus"

    def __init__(self, monitor: Any, specs: tuple[SensorSpec, ...], clock: Clock) -> None:
        self.specs = specs
        self._monitor, self._clock = monitor, clock
        self._totals = {spec.id: 0.0 for spec in specs}
        self._begin()

    def read(self, ids: Collection[str], *, fresh: bool = True) -> dict[str, SensorReading]:
        try:
            measured = _by_id(self._monitor.end_window(_WINDOW, sync_execution=False))
            now = self._clock()
            self._begin()
        except Exception as error:  # Zeus has exceptions for each backend, without a common base
            return dict.fromkeys(ids, ReadFailure(f"Zeus: {error}"))
        for name in self._totals:
            self._totals[name] += measured.get(name, (Component.OTHER, 0.0))[1]
        return {name: EnergySample(now, self._totals[name]) for name in ids}

    def _begin(self) -> None:
        self._monitor.begin_window(_WINDOW, sync_execution=False)  # the meter has already synchronized


def probe_zeus(covered: Collection[Component], *, zeus: Any = None, clock: Clock = time.perf_counter) -> ProbeResult:
    """Look for what Zeus can measure.

    Args:
        covered: components that other sources measure, which are left out.
        zeus: the module to use. Default: ``zeus.monitor``.
        clock: takes the time of readings.
    """
    if zeus is None:
        if importlib.util.find_spec("zeus") is None:
            return ProbeResult("zeus", hints=(INSTALL,))
        try:
            zeus = importlib.import_module("zeus.monitor")
        except Exception as error:  # its dependencies may raise anything
            return ProbeResult("zeus", problems=(f"Zeus is installed but does not load: {error}",))
    try:
        monitor = zeus.ZeusMonitor(
            gpu_indices=[] if Component.GPU in covered else None,
            cpu_indices=[] if Component.CPU in covered else None,
        )
        monitor.begin_window(_WINDOW, sync_execution=False)
        offered = _by_id(monitor.end_window(_WINDOW, sync_execution=False))
    except Exception as error:
        return ProbeResult("zeus", problems=(f"Zeus does not start: {error}",))
    specs = tuple(
        SensorSpec(
            name, f"{name.split('/')[1]} (Zeus)", component, Scope.DEVICE, _provenance(monitor, name), RESOLUTION
        )
        for name, (component, _) in offered.items()
        if component not in covered
    )
    return ProbeResult("zeus", ZeusSource(monitor, specs, clock) if specs else None)


def _provenance(monitor: Any, name: str) -> Provenance:
    """Zeus samples power if a GPU has no energy counter, and does not say so in its results."""
    sampled = getattr(monitor, "power_monitor", None) is not None
    return Provenance.INTEGRATED_POWER if sampled and name.startswith("zeus/gpu ") else Provenance.COUNTER


def _by_id(measurement: Any) -> dict[str, tuple[Component, float]]:
    """Return the component and joules of each sensor id."""
    found: dict[str, tuple[Component, float]] = {}
    for index, joules in (measurement.gpu_energy or {}).items():
        found[f"zeus/gpu {physical_index(index)}"] = (Component.GPU, joules)
    for index, joules in (measurement.cpu_energy or {}).items():
        found[f"zeus/cpu {index}"] = (Component.CPU, joules)
    for index, joules in (measurement.dram_energy or {}).items():
        found[f"zeus/memory {index}"] = (Component.MEMORY, joules)
    chip = getattr(measurement, "soc_energy", None)
    for field, component in _CHIP.items():
        if (millijoules := getattr(chip, field, None)) is not None:
            found[f"zeus/chip {field.removesuffix('_mj')}"] = (component, millijoules / 1e3)
    return found
