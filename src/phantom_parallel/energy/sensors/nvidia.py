"""NVIDIA GPUs through nvidia-ml-py (``pynvml``): the total energy counter, in millijoules since the driver was loaded.

GPUs before Volta have no energy counter. For those only, power is sampled and integrated, with that provenance.
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
from phantom_parallel.energy.sensors.power_integrator import MAX_GAP_SECONDS, SAMPLE_SECONDS, PowerIntegrator
from phantom_parallel.energy.sensors.visible_devices import visible_uuids

COUNTER_SECONDS = 0.1  # the slowest update that has been observed
DRIVER = Path("/proc/driver/nvidia")
INSTALL = "NVIDIA GPUs: pip install nvidia-ml-py"


class NvidiaSource:
    """Reads the GPUs of one host."""

    name = "nvidia"

    def __init__(self, nvml: Any, handles: dict[str, Any], specs: tuple[SensorSpec, ...], clock: Clock) -> None:
        self.specs = specs
        self._nvml, self._handles, self._clock = nvml, handles, clock
        self._integrators = {
            spec.id: PowerIntegrator() for spec in specs if spec.provenance is Provenance.INTEGRATED_POWER
        }

    def read(self, ids: Collection[str], *, fresh: bool = True) -> dict[str, SensorReading]:
        return {name: self._read_one(name) for name in ids}

    def _read_one(self, name: str) -> SensorReading:
        handle = self._handles[name]
        try:
            if name in self._integrators:
                watts = self._nvml.nvmlDeviceGetPowerUsage(handle) / 1e3
                return self._integrators[name].add(watts, self._clock())
            joules = self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
            return EnergySample(self._clock(), joules)
        except self._nvml.NVMLError as error:
            return ReadFailure(f"NVML: {error}")


def probe_nvidia(
    *,
    nvml: Any = None,
    visible: Callable[[], set[str] | None] = visible_uuids,
    clock: Clock = time.perf_counter,
    driver: Path = DRIVER,
) -> ProbeResult:
    """Look for the NVIDIA GPUs that torch can use, or all GPUs of the host if torch has no CUDA.

    Args:
        nvml: the module to use. Default: ``pynvml``.
        visible: returns the UUIDs of the GPUs that torch can use, or None.
        clock: takes the time of readings.
        driver: exists if the NVIDIA driver is loaded.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            if driver.exists():
                return ProbeResult("nvidia", problems=(f"{driver} exists, but pynvml is missing; {INSTALL}",))
            return ProbeResult("nvidia", hints=(INSTALL,))
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        if driver.exists():
            return ProbeResult("nvidia", problems=(f"NVML does not start: {error}",))
        return ProbeResult("nvidia", hints=("NVIDIA GPUs: no driver is loaded",))
    visible_gpus = visible()
    handles, specs, problems = {}, [], []
    for index in range(count):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(nvml.nvmlDeviceGetUUID(handle))
            if visible_gpus is not None and uuid not in visible_gpus:
                continue
            spec = _spec(nvml, handle, index, uuid)
        except nvml.NVMLError as error:
            problems.append(f"NVIDIA GPU {index}: {error}")
            continue
        handles[spec.id] = handle
        specs.append(spec)
    source = NvidiaSource(nvml, handles, tuple(specs), clock) if specs else None
    return ProbeResult("nvidia", source, tuple(problems))


def _spec(nvml: Any, handle: Any, index: int, uuid: str) -> SensorSpec:
    label = f"GPU {index} {_text(nvml.nvmlDeviceGetName(handle))}"
    try:
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError_NotSupported:
        nvml.nvmlDeviceGetPowerUsage(handle)  # raises if there is no power reading either
        method: tuple[Provenance, float, float | None] = Provenance.INTEGRATED_POWER, SAMPLE_SECONDS, MAX_GAP_SECONDS
    else:
        method = Provenance.COUNTER, COUNTER_SECONDS, None
    return SensorSpec(f"nvidia/{uuid}", label, Component.GPU, Scope.DEVICE, *method)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # older releases return bytes
