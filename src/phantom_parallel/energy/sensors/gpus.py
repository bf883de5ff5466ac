"""GPUs: NVIDIA's through nvidia-ml-py (``pynvml``), AMD's through amdsmi.

NVIDIA   total energy in millijoules since the driver was loaded.
AMD      the energy accumulator times its resolution, in microjoules. An MI250X is a package of two dies, which torch
         sees as two devices. It has one counter, reported by the first die, so it is one sensor.

A rank counts the GPU that it computes on. Without a device, every GPU that torch sees, or all of the host if torch was
built for none.
"""

import importlib
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from phantom_parallel.energy.results import Component, Provenance, Scope
from phantom_parallel.energy.sensors.base import (
    Clock,
    CounterSource,
    Discovery,
    EnergySample,
    ReadCounter,
    SensorSpec,
)

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
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        return _missing(driver, f"NVML does not start: {error}", "NVIDIA GPUs: no driver is loaded")
    own = _torch_gpus(device, rocm=False)
    uuids = None if own is None else {f"GPU-{gpu.uuid}" for gpu in own}
    counters: dict[SensorSpec, ReadCounter] = {}
    problems = []
    for index in range(count):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = nvml.nvmlDeviceGetUUID(handle)
            if uuids is None or uuid in uuids:
                read = partial(_read_nvidia, nvml, handle)
                read(clock())
                counters[_spec(f"nvidia/{uuid}", f"GPU {index} {nvml.nvmlDeviceGetName(handle)}")] = read
        except nvml.NVMLError as error:
            problems.append(f"NVIDIA GPU {index}: {error}")
    return Discovery((CounterSource(counters, (nvml.NVMLError,), clock),) if counters else (), tuple(problems))


def _spec(name: str, label: str) -> SensorSpec:
    return SensorSpec(name, label, Component.GPU, Scope.DEVICE, Provenance.COUNTER, COUNTER_SECONDS)


def _missing(driver: Path, problem: str, hint: str) -> Discovery:
    """A library that cannot be used is a problem where its driver is loaded."""
    return Discovery(problems=(problem,)) if driver.exists() else Discovery(hints=(hint,))


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
        packages = _packages(smi, dies)
    except smi.AmdSmiException as error:
        remedy = f"the user must be in the groups that own {driver} (usually render and video)"
        return _missing(driver, f"amdsmi does not start: {error}; {remedy}", "AMD GPUs: no driver is loaded")
    own = _torch_gpus(device, rocm=True)
    addresses = own and {f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}" for gpu in own}
    counters: dict[SensorSpec, ReadCounter] = {}
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
        counters[_spec(f"amd/{bdf}", label)] = read
    return Discovery((CounterSource(counters, (smi.AmdSmiException,), clock),) if counters else (), tuple(problems))


def _packages(smi: Any, dies: list[tuple[str, Any]]) -> list[list[tuple[str, Any]]]:
    """Group dies, which are sorted by PCI address, into packages; a host has one kind of them."""
    size = 2 if dies and TWO_DIES in _market_name(smi, dies[0][1]).upper() else 1
    return [dies[first : first + size] for first in range(0, len(dies), size)]


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
