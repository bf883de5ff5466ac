"""GPUs: NVIDIA's through nvidia-ml-py (``pynvml``), AMD's through amdsmi.

NVIDIA   total energy in millijoules since the driver was loaded.
AMD      the energy accumulator times its resolution, in microjoules. An MI250X is a package of two dies, which torch
         sees as two devices. It has one counter, reported by the first die, so it is one sensor.

A rank counts the GPU that it computes on. Without a device, every GPU that torch sees, or all of the host if torch was
built for none.
"""

import importlib
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from phantom_parallel.energy.results import Component
from phantom_parallel.energy.sensors.base import Clock, CounterSource, Discovery, EnergySample, ReadCounter, SensorSpec

COUNTER_SECONDS = 0.1  # the slowest update that has been observed
NVIDIA_DRIVER, AMD_DRIVER = Path("/proc/driver/nvidia"), Path("/dev/kfd")
NVIDIA_INSTALL = "NVIDIA GPUs: pip install nvidia-ml-py"
AMD_INSTALL = "AMD GPUs: install amdsmi, of the same release as ROCm (pip install amdsmi)"
TWO_DIES = "MI250"  # part of the market name of packages with two dies


def probe_nvidia(
    device: torch.device | None = None,
    *,
    nvml: Any = None,
    clock: Clock = time.perf_counter,
    driver: Path = NVIDIA_DRIVER,
) -> Discovery:
    """Look for the NVIDIA GPU of a rank, or without a device for every GPU that torch sees.

    ``nvml`` is the module ``pynvml``, and ``driver`` exists if the NVIDIA driver is loaded.
    """
    try:
        nvml = nvml or importlib.import_module("pynvml")
    except ImportError:
        return _missing(driver, f"{driver} exists, but pynvml is not installed; {NVIDIA_INSTALL}", NVIDIA_INSTALL)
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        gpus = [(nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle), handle) for handle in handles]
    except nvml.NVMLError as error:
        return _missing(driver, f"NVML does not start: {error}", "NVIDIA GPUs: no driver is loaded")
    own = _torch_gpus(device, rocm=False)
    uuids = own and {f"GPU-{gpu.uuid}" for gpu in own}
    sensors = (
        (f"nvidia/{uuid}", f"GPU {index} {name}", partial(_read_nvidia, nvml, handle))
        for index, (uuid, name, handle) in enumerate(gpus)
        if uuids is None or uuid in uuids
    )
    return _readable(sensors, nvml.NVMLError, clock)


def _read_nvidia(nvml: Any, handle: Any, now: float) -> EnergySample:
    return EnergySample(now, nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3)


def probe_amd(
    device: torch.device | None = None,
    *,
    smi: Any = None,
    clock: Clock = time.perf_counter,
    driver: Path = AMD_DRIVER,
) -> Discovery:
    """Look for the AMD GPU, or package of two dies, of a rank. Like :func:`probe_nvidia`; ``smi`` is ``amdsmi``."""
    try:
        smi = smi or importlib.import_module("amdsmi")
    except (ImportError, OSError, KeyError) as error:  # the last two if it cannot load the ROCm library
        return _missing(driver, f"{driver} exists, but amdsmi does not load ({error}); {AMD_INSTALL}", AMD_INSTALL)
    try:
        smi.amdsmi_init()
        dies = sorted(
            ((str(smi.amdsmi_get_gpu_device_bdf(die)).lower(), die) for die in smi.amdsmi_get_processor_handles()),
            key=lambda die: die[0],
        )
        name = str(smi.amdsmi_get_gpu_asic_info(dies[0][1])["market_name"]).strip() if dies else ""
    except smi.AmdSmiException as error:
        remedy = f"the user must be in the groups that own {driver} (usually render and video)"
        return _missing(driver, f"amdsmi does not start: {error}; {remedy}", "AMD GPUs: no driver is loaded")
    size = 2 if TWO_DIES in name.upper() else 1  # a host has one kind of packages
    packages = [dies[first : first + size] for first in range(0, len(dies), size)]
    own = _torch_gpus(device, rocm=True)
    addresses = own and {f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}" for gpu in own}
    sensors = (
        (f"amd/{package[0][0]}", f"GPU {'package ' * (size > 1)}{index} {name}", partial(_read_amd, smi, package[0][1]))
        for index, package in enumerate(packages)
        if addresses is None or any(bdf.rsplit(".", 1)[0] in addresses for bdf, _ in package)
    )
    return _readable(sensors, smi.AmdSmiException, clock)


def _read_amd(smi: Any, handle: Any, now: float) -> EnergySample:
    count = smi.amdsmi_get_energy_count(handle)
    return EnergySample(now, float(count["energy_accumulator"]) * count["counter_resolution"] / 1e6)


def _missing(driver: Path, problem: str, hint: str) -> Discovery:
    """A library that cannot be used is a problem where its driver is loaded."""
    return Discovery(problems=(problem,)) if driver.exists() else Discovery(hints=(hint,))


def _readable(sensors: Iterable[tuple[str, str, ReadCounter]], error: type[Exception], clock: Clock) -> Discovery:
    """Those of the sensors (id, label, counter) that can be read."""
    counters, problems = dict[SensorSpec, ReadCounter](), []
    for name, label, read in sensors:
        try:
            read(clock())
            counters[SensorSpec(name, label, Component.GPU, COUNTER_SECONDS)] = read
        except error as raised:
            problems.append(f"{label}: no energy counter: {raised}")
    return Discovery((CounterSource(counters, (error,), clock),) if counters else (), tuple(problems))


def _torch_gpus(device: torch.device | None, *, rocm: bool) -> list[Any] | None:
    """Torch's properties of a rank's GPU, or of all without a device. None: torch was built for no such GPUs."""
    available = torch.cuda.is_available() and (torch.version.hip is not None) == rocm
    if device is None:
        return [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if available else None
    return [torch.cuda.get_device_properties(device)] if available and device.type == "cuda" else []
