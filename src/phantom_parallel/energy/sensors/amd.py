"""AMD GPUs through amdsmi: the energy accumulator times its resolution, in microjoules.

An MI250X is one package of two dies that torch sees as two devices. It has one counter, which the even die reports, so
it is one sensor.
"""

import importlib
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from phantom_parallel.energy.readings import Part, Provenance, Scope
from phantom_parallel.energy.sensors.base import Clock, Failed, Finding, Reading, Sample, SensorSpec
from phantom_parallel.energy.sensors.visible import visible_bdfs

COUNTER_SECONDS = 0.1  # the driver may answer from a cache of this age
DRIVER = Path("/dev/kfd")
INSTALL = "AMD GPUs: install amdsmi, of the same release as ROCm (pip install amdsmi)"
TWO_DIES = "MI250"  # in the market name of packages of two dies


class AmdSource:
    """The GPUs, or packages, of one host."""

    name = "amd"

    def __init__(self, smi: Any, handles: dict[str, Any], specs: tuple[SensorSpec, ...], clock: Clock) -> None:
        self.specs = specs
        self._smi, self._handles, self._clock = smi, handles, clock

    def read(self, ids: Collection[str], *, settle: bool = True) -> dict[str, Reading]:
        readings: dict[str, Reading] = {}
        for name in ids:
            try:
                readings[name] = Sample(self._clock(), _joules(self._smi, self._handles[name]))
            except self._smi.AmdSmiException as error:
                readings[name] = Failed(f"amdsmi: {error}")
        return readings


def find_amd(
    *,
    smi: Any = None,
    visible: Callable[[], set[str] | None] = visible_bdfs,
    clock: Clock = time.perf_counter,
    driver: Path = DRIVER,
) -> Finding:
    """The AMD GPUs that torch sees, or all of the host where torch cannot tell. ``smi`` is the module to use."""
    if smi is None:
        try:
            smi = importlib.import_module("amdsmi")
        except (ImportError, OSError, KeyError) as error:  # the last two where it cannot load ROCm's library
            if driver.exists():
                return Finding("amd", problems=(f"{driver} exists, but amdsmi does not load ({error}); {INSTALL}",))
            return Finding("amd", hints=(INSTALL,))
    try:
        smi.amdsmi_init()
        found = [(str(smi.amdsmi_get_gpu_device_bdf(h)).lower(), h) for h in smi.amdsmi_get_processor_handles()]
        dies = sorted(found, key=lambda die: die[0])
    except smi.AmdSmiException as error:
        if driver.exists():
            remedy = f"the user must be in the groups that own {driver} (usually render and video)"
            return Finding("amd", problems=(f"amdsmi does not start: {error}; {remedy}",))
        return Finding("amd", hints=("AMD GPUs: no driver is loaded",))
    return _choose(smi, dies, visible(), clock)


def _choose(smi: Any, dies: list[tuple[str, Any]], mine: set[str] | None, clock: Clock) -> Finding:
    handles, specs, problems = {}, [], []
    packages: list[list[tuple[str, Any]]] = []
    half_open = False
    for bdf, handle in dies:
        paired = TWO_DIES in _market_name(smi, handle).upper()
        if paired and half_open:
            packages[-1].append((bdf, handle))
            half_open = False
        else:
            packages.append([(bdf, handle)])
            half_open = paired
    for number, package in enumerate(packages):
        if mine is not None and not any(bdf.rsplit(".", 1)[0] in mine for bdf, _ in package):
            continue
        bdf, handle = package[0]
        label = f"GPU {'package ' if len(package) > 1 else ''}{number} {_market_name(smi, handle)}".rstrip()
        try:
            _joules(smi, handle)
        except smi.AmdSmiException as error:
            problems.append(f"{label}: no energy counter: {error}")
            continue
        spec = SensorSpec(f"amd/{bdf}", label, Part.GPU, Scope.DEVICE, Provenance.COUNTER, COUNTER_SECONDS)
        handles[spec.id] = handle
        specs.append(spec)
    return Finding("amd", AmdSource(smi, handles, tuple(specs), clock) if specs else None, tuple(problems))


def _market_name(smi: Any, handle: Any) -> str:
    try:
        return str(smi.amdsmi_get_gpu_asic_info(handle).get("market_name", "")).strip()
    except smi.AmdSmiException:
        return ""


def _joules(smi: Any, handle: Any) -> float:
    count = smi.amdsmi_get_energy_count(handle)
    steps = count["energy_accumulator"] if "energy_accumulator" in count else count["power"]  # its name before ROCm 6.2
    return float(steps) * count["counter_resolution"] / 1e6
