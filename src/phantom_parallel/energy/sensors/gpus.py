"""GPUs: NVIDIA's through nvidia-ml-py (``pynvml``), AMD's through amdsmi.

NVIDIA   total energy in millijoules since the driver was loaded. GPUs before Volta have no such counter: for those,
         power is sampled and integrated, with that provenance.
AMD      the energy accumulator times its resolution, in microjoules. An MI250X is a package of two dies, which torch
         sees as two devices. It has one counter, reported by the first die, so it is one sensor.

A rank counts the GPU that it computes on. Without a device, every GPU that torch sees, or all of the host if torch was
built for none.
"""

import importlib
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from phantom_parallel.energy.results import Component, Provenance, Scope
from phantom_parallel.energy.sensors.base import (
    Clock,
    Discovery,
    EnergySample,
    ReadFailure,
    SensorReading,
    SensorSpec,
)

COUNTER_SECONDS = 0.1  # the slowest update that has been observed
SAMPLE_SECONDS = 0.1  # seconds between power samples
MAX_GAP_SECONDS = 1.0  # over a longer gap, the power in between would be a guess
NVIDIA_DRIVER, AMD_DRIVER = Path("/proc/driver/nvidia"), Path("/dev/kfd")
NVIDIA_INSTALL = "NVIDIA GPUs: pip install nvidia-ml-py"
AMD_INSTALL = "AMD GPUs: install amdsmi, of the same release as ROCm (pip install amdsmi)"
TWO_DIES = "MI250"  # part of the market name of packages with two dies

ReadTotal = Callable[[float], EnergySample]  # from the time of the reading


class GpuSource:
    """Reads the counters of GPUs, each by a function; ``error`` is what these raise."""

    def __init__(self, totals: Mapping[SensorSpec, ReadTotal], error: type[Exception], clock: Clock) -> None:
        self.specs = tuple(totals)
        self._totals = {spec.id: read for spec, read in totals.items()}
        self._error, self._clock = error, clock

    def read(self, ids: Collection[str], *, fresh: bool = True) -> dict[str, SensorReading]:
        readings: dict[str, SensorReading] = {}
        for name in ids:
            try:
                readings[name] = self._totals[name](self._clock())
            except self._error as error:
                readings[name] = ReadFailure(str(error))
        return readings


class PowerIntegrator:
    """Trapezoidal rule over power samples, as a running total of joules. ``watts`` reads the power."""

    def __init__(self, watts: Callable[[], float]) -> None:
        self._watts, self._joules, self._epoch = watts, 0.0, "sampled power"
        self._last: tuple[float, float] | None = None

    def __call__(self, now: float) -> EnergySample:
        watts = self._watts()
        if self._last is not None:
            last_time, last_watts = self._last
            elapsed = now - last_time
            self._joules += elapsed * (last_watts + watts) / 2
            if elapsed > MAX_GAP_SECONDS:
                self._epoch = f"no power sample for {elapsed:.3g} s up to {now:.3f}"
        self._last = (now, watts)
        return EnergySample(now, self._joules, self._epoch)


def probe_nvidia(
    device: torch.device | None = None,
    *,
    nvml: Any = None,
    clock: Clock = time.perf_counter,
    driver: Path = NVIDIA_DRIVER,
) -> Discovery:
    """Look for the NVIDIA GPU of a rank.

    Args:
        device: the rank's device. Default: None, every GPU that torch sees.
        nvml: the module to use. Default: ``pynvml``.
        clock: takes the time of readings.
        driver: exists if the NVIDIA driver is loaded.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            if driver.exists():
                return Discovery(problems=(f"{driver} exists, but pynvml is not installed; {NVIDIA_INSTALL}",))
            return Discovery(hints=(NVIDIA_INSTALL,))
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        if driver.exists():
            return Discovery(problems=(f"NVML does not start: {error}",))
        return Discovery(hints=("NVIDIA GPUs: no driver is loaded",))
    own = _torch_gpus(device, rocm=False)
    uuids = None if own is None else {f"GPU-{gpu.uuid}" for gpu in own}
    totals: dict[SensorSpec, ReadTotal] = {}
    problems = []
    for index in range(count):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = nvml.nvmlDeviceGetUUID(handle)
            if uuids is None or uuid in uuids:
                spec, read = _nvidia_sensor(nvml, handle, f"nvidia/{uuid}", f"GPU {index}")
                totals[spec] = read
        except nvml.NVMLError as error:
            problems.append(f"NVIDIA GPU {index}: {error}")
    return Discovery((GpuSource(totals, nvml.NVMLError, clock),) if totals else (), tuple(problems))


def _nvidia_sensor(nvml: Any, handle: Any, name: str, label: str) -> tuple[SensorSpec, ReadTotal]:
    label = f"{label} {nvml.nvmlDeviceGetName(handle)}"
    try:
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError_NotSupported:
        nvml.nvmlDeviceGetPowerUsage(handle)  # raises if there is no power reading either
        method = Provenance.INTEGRATED_POWER, SAMPLE_SECONDS, MAX_GAP_SECONDS
        integrator = PowerIntegrator(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3)
        return SensorSpec(name, label, Component.GPU, Scope.DEVICE, *method), integrator

    def read(now: float) -> EnergySample:
        return EnergySample(now, nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3)

    return SensorSpec(name, label, Component.GPU, Scope.DEVICE, Provenance.COUNTER, COUNTER_SECONDS), read


def probe_amd(
    device: torch.device | None = None,
    *,
    smi: Any = None,
    clock: Clock = time.perf_counter,
    driver: Path = AMD_DRIVER,
) -> Discovery:
    """Look for the AMD GPU, or package of two dies, of a rank. Like :func:`probe_nvidia`; ``smi`` is ``amdsmi``."""
    if smi is None:
        try:
            smi = importlib.import_module("amdsmi")
        except (ImportError, OSError, KeyError) as error:  # the last two if it cannot load the ROCm library
            if driver.exists():
                return Discovery(problems=(f"{driver} exists, but amdsmi does not load ({error}); {AMD_INSTALL}",))
            return Discovery(hints=(AMD_INSTALL,))
    try:
        smi.amdsmi_init()
        dies = sorted(
            ((str(smi.amdsmi_get_gpu_device_bdf(die)).lower(), die) for die in smi.amdsmi_get_processor_handles()),
            key=lambda die: die[0],
        )
        packages = _packages(smi, dies)
    except smi.AmdSmiException as error:
        if driver.exists():
            remedy = f"the user must be in the groups that own {driver} (usually render and video)"
            return Discovery(problems=(f"amdsmi does not start: {error}; {remedy}",))
        return Discovery(hints=("AMD GPUs: no driver is loaded",))
    own = _torch_gpus(device, rocm=True)
    addresses = own and {f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}" for gpu in own}
    totals: dict[SensorSpec, ReadTotal] = {}
    problems = []
    for number, package in enumerate(packages):
        if addresses is not None and not any(bdf.rsplit(".", 1)[0] in addresses for bdf, _ in package):
            continue
        bdf, handle = package[0]
        label = f"GPU {'package ' if len(package) > 1 else ''}{number} {_market_name(smi, handle)}"
        read = partial(_read_amd, smi, handle)
        try:
            read(clock())
        except smi.AmdSmiException as error:
            problems.append(f"{label}: no energy counter: {error}")
            continue
        spec = SensorSpec(f"amd/{bdf}", label, Component.GPU, Scope.DEVICE, Provenance.COUNTER, COUNTER_SECONDS)
        totals[spec] = read
    return Discovery((GpuSource(totals, smi.AmdSmiException, clock),) if totals else (), tuple(problems))


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


def _market_name(smi: Any, handle: Any) -> str:
    return str(smi.amdsmi_get_gpu_asic_info(handle)["market_name"]).strip()


def _read_amd(smi: Any, handle: Any, now: float) -> EnergySample:
    count = smi.amdsmi_get_energy_count(handle)
    return EnergySample(now, float(count["energy_accumulator"]) * count["counter_resolution"] / 1e6)


def _torch_gpus(device: torch.device | None, *, rocm: bool) -> list[Any] | None:
    """Torch's properties of a rank's GPU, or of all without a device. None: torch was built for no such GPUs."""
    available = torch.cuda.is_available() and (torch.version.hip is not None) == rocm
    if device is None:
        return [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if available else None
    return [torch.cuda.get_device_properties(device)] if available and device.type == "cuda" else []
