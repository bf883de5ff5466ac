"""Energy sensors and their discovery: RAPL, Cray's counters, NVIDIA and AMD GPUs, and those of other packages.

A probe is a function ``probe(device, *, clock) -> Discovery`` that looks for one kind of sensor; a source reads energy
totals of those that it found. Other packages add probes as entry points of the group ``phantom_parallel.sensors``. A
sensor that does not exist is left out. One that exists but cannot be read is reported with what is missing.

RAPL     Intel's and AMD's, through Linux powercap: a counter for each CPU package, and one for its memory if present.
         ``energy_uj`` counts from 0 to ``max_energy_range_uj`` and wraps. intel-rapl-mmio is another interface to the
         same packages and is left out.

             intel-rapl:0      package-0   counted
             intel-rapl:0:0    core        part of the package: left out, as is uncore
             intel-rapl:0:2    dram        not part of the package: counted
             intel-rapl:1      psys        the platform including the packages: left out

Cray     ``pm_counters``: energy of a node's accelerators, CPUs and memory, updated ten times a second. Each file has
         ``VALUE UNIT TIME us``. ``freshness`` increases with each update: readings at the ends of a window wait for the
         next one. ``generation`` and ``startup`` change when the counters are reset, which voids a window.
NVIDIA   nvidia-ml-py (``pynvml``): total energy in millijoules since the driver was loaded.
AMD      amdsmi: the energy accumulator times its resolution, in microjoules. An MI250X is a package of two dies, which
         torch sees as two devices. It has one counter, reported by the first die, so it is one sensor.

A rank counts the GPU that it computes on. Without a device, every GPU that torch sees, or all of the host if torch was
built for none.
"""

import importlib
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

import torch

from phantom_parallel.energy.results import Component, Provenance

Clock = Callable[[], float]

# A counter is up to one update old at each end of a window, so a window of n updates is off by at most 1/n.
MIN_UPDATES = 10


@dataclass(frozen=True)
class SensorSpec:
    """Description of one physical sensor."""

    id: str  # SOURCE/NAME, unique on its host
    label: str
    component: Component
    resolution_seconds: float  # between updates of its value
    max_unread_seconds: float | None = None  # after which it loses count; None if it never does
    provenance: Provenance = Provenance.COUNTER

    @property
    def source(self) -> str:
        """Name of the source that reads this sensor."""
        return self.id.split("/", 1)[0]

    @property
    def shortest_window(self) -> float:
        """Seconds that a window must take for a valid figure."""
        return MIN_UPDATES * self.resolution_seconds


@dataclass(frozen=True)
class EnergySample:
    """Joules since an arbitrary start. The difference of two samples is meaningful only if ``epoch`` is the same."""

    seconds: float
    joules: float
    epoch: str = ""


@dataclass(frozen=True)
class ReadFailure:
    """A sensor could not be read this time."""

    reason: str


SensorReading = EnergySample | ReadFailure
ReadCounter = Callable[[float], EnergySample]  # from the time of the reading


class SensorSource(Protocol):
    """Sensors that are read together."""

    specs: tuple[SensorSpec, ...]

    def read(self, *, fresh: bool = True) -> dict[str, SensorReading]:
        """Read every sensor, by id; with ``fresh`` after the next update, where the source knows when it arrives."""
        ...


class CounterSource:
    """Sensors of which each is read by a function of the time; ``errors`` are what these functions raise."""

    def __init__(
        self, counters: Mapping[SensorSpec, ReadCounter], errors: tuple[type[Exception], ...], clock: Clock
    ) -> None:
        self.specs = tuple(counters)
        self._counters, self._errors, self._clock = counters, errors, clock

    def read(self, *, fresh: bool = True) -> dict[str, SensorReading]:
        readings: dict[str, SensorReading] = {}
        for spec, read in self._counters.items():
            try:
                readings[spec.id] = read(self._clock())
            except self._errors as error:
                readings[spec.id] = ReadFailure(str(error))
        return readings


@dataclass(frozen=True)
class Discovery:
    """Sensors that can be read, those that exist but cannot, and how to get more."""

    sources: tuple[SensorSource, ...] = ()
    problems: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()

    @property
    def specs(self) -> tuple[SensorSpec, ...]:
        return tuple(spec for source in self.sources for spec in source.specs)


def describe_os_error(path: Path, error: OSError, remedy: str) -> str:
    """Return one line that names the file, the error and, if permission is missing, the remedy."""
    if isinstance(error, PermissionError):
        return f"{path}: permission denied; {remedy}"
    return f"{path}: {error.strerror or error}"


POWERCAP = Path("/sys/class/powercap")
RAPL_REMEDY = "only root can read RAPL by default; allow it: sudo chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj"
RAPL_SECONDS = 0.001  # between updates of the registers, about
# More than any package draws. A counter that fell has wrapped if the energy that this implies is possible at this
# power, and was reset if not. A counter must be read again before this power could wrap it twice.
PLAUSIBLE_WATTS = 2000.0

_ZONE = re.compile(r"intel-rapl:\d+(:\d+)?")


@dataclass
class _Zone:
    spec: SensorSpec
    file: Path
    range_uj: int
    last_uj: int
    last_seconds: float
    total_uj: int = 0  # with wraps undone
    epoch: str = "uninterrupted"

    def read(self, now: float) -> EnergySample:
        now_uj, elapsed = int(self.file.read_text()), now - self.last_seconds
        used_uj = now_uj - self.last_uj
        if used_uj < 0:
            used_uj += self.range_uj
            if used_uj > PLAUSIBLE_WATTS * 1e6 * max(elapsed, RAPL_SECONDS):
                self.epoch = f"reset: from {self.last_uj} to {now_uj} uJ within {elapsed:.3g} s at {now:.3f}"
        if self.spec.max_unread_seconds is not None and elapsed > self.spec.max_unread_seconds:
            self.epoch = f"unread for {elapsed:.3g} s at {now:.3f}: it may have wrapped more than once"
        self.total_uj += used_uj
        self.last_uj, self.last_seconds = now_uj, now
        return EnergySample(now, self.total_uj / 1e6, self.epoch)


def probe_rapl(root: Path = POWERCAP, *, clock: Clock = time.perf_counter) -> Discovery:
    """Look for RAPL zones in the directory ``root``."""
    folders = sorted(path for path in root.glob("intel-rapl:*") if _ZONE.fullmatch(path.name))
    if not folders:
        hint = (
            f"CPU and memory: no RAPL zones in {root}; on a physical Intel or AMD machine with Linux load them with "
            "'sudo modprobe intel_rapl_msr' (virtual machines rarely have them)"
        )
        return Discovery(hints=(hint,))
    zones, problems = [], []
    for folder in folders:
        try:
            if zone := _open(folder, clock):
                zones.append(zone)
        except OSError as error:
            problems.append(describe_os_error(Path(error.filename or folder), error, RAPL_REMEDY))
        except ValueError as error:
            problems.append(f"{folder}: {error}")
    source = CounterSource({zone.spec: zone.read for zone in zones}, (OSError, ValueError), clock)
    return Discovery((source,) if zones else (), tuple(problems))


def _open(folder: Path, clock: Clock) -> _Zone | None:
    """Open the zone of a directory; None if it is part of another zone, or includes others."""
    name = (folder / "name").read_text().strip()
    if name.startswith("package"):
        measures = name, Component.CPU
    elif name == "dram":
        measures = f"memory of package {folder.name.split(':')[1]}", Component.MEMORY
    else:
        return None
    file = folder / "energy_uj"
    first = int(file.read_text())
    if first == 0:
        raise ValueError("energy_uj reads 0: this zone does not count")
    range_uj = int((folder / "max_energy_range_uj").read_text())
    spec = SensorSpec(f"rapl/{folder.name}", *measures, RAPL_SECONDS, range_uj / 1e6 / PLAUSIBLE_WATTS)
    return _Zone(spec, file, range_uj, first, clock())


PM_COUNTERS = Path("/sys/cray/pm_counters")
CRAY_REMEDY = "these files are world-readable on a Cray by default; ask the site to allow it"
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
            return dict.fromkeys(ids, ReadFailure(describe_os_error(path, error, CRAY_REMEDY)))
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


COUNTER_SECONDS = 0.1  # the slowest update that has been observed
NVIDIA_DRIVER, AMD_DRIVER = Path("/proc/driver/nvidia"), Path("/dev/kfd")
NVIDIA_INSTALL = "NVIDIA GPUs: pip install nvidia-ml-py"
AMD_INSTALL = "AMD GPUs: install amdsmi, of the same release as ROCm (pip install amdsmi)"
TWO_DIES = "MI250"  # part of the market name of packages with two dies


def probe_nvidia(
    device: torch.device | None = None, *, nvml: Any = None, clock: Clock = time.perf_counter
) -> Discovery:
    """Look for the NVIDIA GPU of a rank, or without a device for every GPU that torch sees; ``nvml`` is ``pynvml``."""
    driver = NVIDIA_DRIVER
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


def probe_amd(device: torch.device | None = None, *, smi: Any = None, clock: Clock = time.perf_counter) -> Discovery:
    """Look for the AMD GPU, or package of two dies, of a rank. Like :func:`probe_nvidia`; ``smi`` is ``amdsmi``."""
    driver = AMD_DRIVER
    try:
        smi = smi or importlib.import_module("amdsmi")
    except (ImportError, OSError, KeyError) as error:  # the last two if it cannot load the ROCm library
        return _missing(driver, f"{driver} exists, but amdsmi does not load ({error}); {AMD_INSTALL}", AMD_INSTALL)
    try:
        smi.amdsmi_init()
        handles = smi.amdsmi_get_processor_handles()
        dies = sorted(((str(smi.amdsmi_get_gpu_device_bdf(die)).lower(), die) for die in handles), key=itemgetter(0))
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


ENTRY_POINTS = "phantom_parallel.sensors"


def discover(
    device: torch.device | None = None,
    *,
    powercap: Path = POWERCAP,
    pm_counters: Path = PM_COUNTERS,
    clock: Clock = time.perf_counter,
) -> Discovery:
    """Find the sensors that this process can read: those of the host's CPUs and memory, and of its GPUs.

    With the ``device`` of this rank, other GPUs are left out.
    """
    results = [
        probe_nvidia(device, clock=clock),
        probe_amd(device, clock=clock),
        probe_rapl(powercap, clock=clock),
        probe_cray(pm_counters, accelerators=device is None or device.type != "cpu", clock=clock),
        *(plugin.load()(device, clock=clock) for plugin in entry_points(group=ENTRY_POINTS)),
    ]
    return Discovery(
        tuple(source for result in results for source in result.sources),
        tuple(problem for result in results for problem in result.problems),
        tuple(hint for result in results for hint in result.hints),
    )
