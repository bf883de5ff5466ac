"""NVIDIA GPUs through nvidia-ml-py (``pynvml``): the total energy counter, in millijoules since the driver was loaded.

GPUs before Volta have no such counter. There, and only there, power is sampled and integrated, and the figure says so.
"""

import importlib
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from phantom_parallel.energy.readings import Part, Provenance, Scope
from phantom_parallel.energy.sensors.base import Clock, Failed, Finding, Reading, Sample, SensorSpec
from phantom_parallel.energy.sensors.power import LONGEST_GAP, SAMPLE_SECONDS, PowerIntegrator
from phantom_parallel.energy.sensors.visible import visible_uuids

COUNTER_SECONDS = 0.1  # the slowest update of the counter that has been seen
DRIVER = Path("/proc/driver/nvidia")
INSTALL = "NVIDIA GPUs: pip install nvidia-ml-py"


class NvidiaSource:
    """The GPUs of one host."""

    name = "nvidia"

    def __init__(self, nvml: Any, handles: dict[str, Any], specs: tuple[SensorSpec, ...], clock: Clock) -> None:
        self.specs = specs
        self._nvml, self._handles, self._clock = nvml, handles, clock
        self._integrators = {
            spec.id: PowerIntegrator() for spec in specs if spec.provenance is Provenance.INTEGRATED_POWER
        }

    def read(self, ids: Collection[str], *, settle: bool = True) -> dict[str, Reading]:
        return {name: self._read_one(name) for name in ids}

    def _read_one(self, name: str) -> Reading:
        handle = self._handles[name]
        try:
            if name in self._integrators:
                watts = self._nvml.nvmlDeviceGetPowerUsage(handle) / 1e3
                return self._integrators[name].add(watts, self._clock())
            joules = self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
            return Sample(self._clock(), joules)
        except self._nvml.NVMLError as error:
            return Failed(f"NVML: {error}")


def find_nvidia(
    *,
    nvml: Any = None,
    visible: Callable[[], set[str] | None] = visible_uuids,
    clock: Clock = time.perf_counter,
    driver: Path = DRIVER,
) -> Finding:
    """The NVIDIA GPUs that torch sees, or all of the host where torch cannot tell. ``nvml`` is the module to use."""
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return (
                Finding("nvidia", problems=(f"{DRIVER} exists, but pynvml is missing; {INSTALL}",))
                if (driver.exists())
                else Finding("nvidia", hints=(INSTALL,))
            )
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        problems = (f"NVML does not start: {error}",) if driver.exists() else ()
        return Finding("nvidia", None, problems, () if problems else ("NVIDIA GPUs: no driver is loaded",))
    mine = visible()
    handles, specs, problems_found = {}, [], []
    for index in range(count):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(nvml.nvmlDeviceGetUUID(handle))
            if mine is not None and uuid not in mine:
                continue
            spec = _spec(nvml, handle, index, uuid)
        except nvml.NVMLError as error:
            problems_found.append(f"NVIDIA GPU {index}: {error}")
            continue
        handles[spec.id] = handle
        specs.append(spec)
    source = NvidiaSource(nvml, handles, tuple(specs), clock) if specs else None
    return Finding("nvidia", source, tuple(problems_found))


def _spec(nvml: Any, handle: Any, index: int, uuid: str) -> SensorSpec:
    label = f"GPU {index} {_text(nvml.nvmlDeviceGetName(handle))}"
    try:
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError_NotSupported:
        nvml.nvmlDeviceGetPowerUsage(handle)  # where this fails too, there is no sensor
        kind, resolution, horizon = Provenance.INTEGRATED_POWER, SAMPLE_SECONDS, LONGEST_GAP
        return SensorSpec(f"nvidia/{uuid}", label, Part.GPU, Scope.DEVICE, kind, resolution, horizon)
    return SensorSpec(f"nvidia/{uuid}", label, Part.GPU, Scope.DEVICE, Provenance.COUNTER, COUNTER_SECONDS)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # older releases return bytes
