"""AMD GPUs through amdsmi: the energy accumulator times its resolution, in microjoules.

An MI250X is a package of two dies, which torch sees as two devices. The package has one counter, reported by the first
die, so it is one sensor.
"""

import importlib
import time
from collections.abc import Callable, Collection
from pathlib import Path
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
from phantom_parallel.energy.sensors.visible_devices import visible_bdfs

COUNTER_SECONDS = 0.1  # the driver may answer from a cache of this age
DRIVER = Path("/dev/kfd")
INSTALL = "AMD GPUs: install amdsmi, of the same release as ROCm (pip install amdsmi)"
TWO_DIES = "MI250"  # part of the market name of packages with two dies


class AmdSource:
    """Reads the GPUs, or packages, of one host."""

    name = "amd"

    def __init__(self, smi: Any, handles: dict[str, Any], specs: tuple[SensorSpec, ...], clock: Clock) -> None:
        self.specs = specs
        self._smi, self._handles, self._clock = smi, handles, clock

    def read(self, ids: Collection[str], *, fresh: bool = True) -> dict[str, SensorReading]:
        readings: dict[str, SensorReading] = {}
        for name in ids:
            try:
                readings[name] = EnergySample(self._clock(), _joules(self._smi, self._handles[name]))
            except self._smi.AmdSmiException as error:
                readings[name] = ReadFailure(f"amdsmi: {error}")
        return readings


def probe_amd(
    *,
    smi: Any = None,
    visible: Callable[[], set[str] | None] = visible_bdfs,
    clock: Clock = time.perf_counter,
    driver: Path = DRIVER,
) -> ProbeResult:
    """Look for the AMD GPUs that torch can use, or all GPUs of the host if torch has no ROCm.

    Args:
        smi: the module to use. Default: ``amdsmi``.
        visible: returns the PCI addresses of the GPUs that torch can use, or None.
        clock: takes the time of readings.
        driver: exists if the AMD driver is loaded.
    """
    if smi is None:
        try:
            smi = importlib.import_module("amdsmi")
        except (ImportError, OSError, KeyError) as error:  # the last two if it cannot load the ROCm library
            if driver.exists():
                return ProbeResult("amd", problems=(f"{driver} exists, but amdsmi does not load ({error}); {INSTALL}",))
            return ProbeResult("amd", hints=(INSTALL,))
    try:
        smi.amdsmi_init()
        found = [(str(smi.amdsmi_get_gpu_device_bdf(h)).lower(), h) for h in smi.amdsmi_get_processor_handles()]
        dies = sorted(found, key=lambda die: die[0])
    except smi.AmdSmiException as error:
        if driver.exists():
            remedy = f"the user must be in the groups that own {driver} (usually render and video)"
            return ProbeResult("amd", problems=(f"amdsmi does not start: {error}; {remedy}",))
        return ProbeResult("amd", hints=("AMD GPUs: no driver is loaded",))
    return _open_packages(smi, _packages(smi, dies), visible(), clock)


def _packages(smi: Any, dies: list[tuple[str, Any]]) -> list[list[tuple[str, Any]]]:
    """Group dies, which are sorted by PCI address, into packages of one or two."""
    packages: list[list[tuple[str, Any]]] = []
    second_die_follows = False
    for bdf, handle in dies:
        two_dies = TWO_DIES in _market_name(smi, handle).upper()
        if two_dies and second_die_follows:
            packages[-1].append((bdf, handle))
            second_die_follows = False
        else:
            packages.append([(bdf, handle)])
            second_die_follows = two_dies
    return packages


def _open_packages(
    smi: Any, packages: list[list[tuple[str, Any]]], visible: set[str] | None, clock: Clock
) -> ProbeResult:
    handles, specs, problems = {}, [], []
    for number, package in enumerate(packages):
        if visible is not None and not any(bdf.rsplit(".", 1)[0] in visible for bdf, _ in package):
            continue
        bdf, handle = package[0]
        label = f"GPU {'package ' if len(package) > 1 else ''}{number} {_market_name(smi, handle)}".rstrip()
        try:
            _joules(smi, handle)
        except smi.AmdSmiException as error:
            problems.append(f"{label}: no energy counter: {error}")
            continue
        spec = SensorSpec(f"amd/{bdf}", label, Component.GPU, Scope.DEVICE, Provenance.COUNTER, COUNTER_SECONDS)
        handles[spec.id] = handle
        specs.append(spec)
    return ProbeResult("amd", AmdSource(smi, handles, tuple(specs), clock) if specs else None, tuple(problems))


def _market_name(smi: Any, handle: Any) -> str:
    try:
        return str(smi.amdsmi_get_gpu_asic_info(handle).get("market_name", "")).strip()
    except smi.AmdSmiException:
        return ""


def _joules(smi: Any, handle: Any) -> float:
    count = smi.amdsmi_get_energy_count(handle)
    steps = count["energy_accumulator"] if "energy_accumulator" in count else count["power"]  # its name before ROCm 6.2
    return float(steps) * count["counter_resolution"] / 1e6
