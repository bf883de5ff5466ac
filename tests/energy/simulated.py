"""Simulated machines: sysfs trees in the real formats, and fakes of the documented calls of vendor libraries."""

from pathlib import Path

from phantom_parallel.energy import EnergyMeter
from phantom_parallel.energy.sensors import Discovery

PACKAGE_RANGE = 262_143_328_850  # microjoules, as on a Xeon


class FakeClock:
    """A clock that advances only when a test advances it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def metered(probe: Discovery, clock: FakeClock) -> EnergyMeter:
    """A meter of the sensors that a probe has discovered."""
    return EnergyMeter(sources=probe.sources, clock=clock, device="cpu")


class Powercap:
    """A powercap tree as /sys/class/powercap shows it: all zones side by side."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def zone(self, folder: str, name: str, energy_uj: int, range_uj: int = PACKAGE_RANGE) -> "Powercap":
        path = self.root / folder
        path.mkdir(parents=True)
        (path / "name").write_text(f"{name}\n")
        (path / "max_energy_range_uj").write_text(f"{range_uj}\n")
        self.set(folder, energy_uj)
        return self

    def set(self, folder: str, energy_uj: int) -> None:
        (self.root / folder / "energy_uj").write_text(f"{energy_uj}\n")

    def use(self, folder: str, joules: float) -> None:
        """Use energy, with the wraparound of the real counter."""
        path = self.root / folder
        now = int((path / "energy_uj").read_text()) + round(joules * 1e6)
        self.set(folder, now % int((path / "max_energy_range_uj").read_text()))


def two_packages(root: Path) -> Powercap:
    """A server with two sockets: packages, their subdomains, memory, and the platform."""
    tree = Powercap(root)
    (root / "intel-rapl").mkdir()
    for package in (0, 1):
        tree.zone(f"intel-rapl:{package}", f"package-{package}", 5_000_000)
        tree.zone(f"intel-rapl:{package}:0", "core", 3_000_000)
        tree.zone(f"intel-rapl:{package}:1", "dram", 1_000_000, 65_712_999_613)
    tree.zone("intel-rapl:2", "psys", 9_000_000)
    return tree.zone("intel-rapl-mmio:0", "package-0", 5_000_000)


class PmCounters:
    """A pm_counters directory of a node with accelerators; each update increments ``freshness``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True)
        self.joules = {"energy": 1000, "cpu_energy": 200, "memory_energy": 100}
        self.joules |= {f"accel{i}_energy": 150 for i in range(4)}
        self.words = {"freshness": 7, "generation": 3, "startup": 1_700_000_000, "raw_scan_hz": 10, "version": 2}
        self.write()

    def write(self) -> None:
        for file, joules in self.joules.items():
            (self.root / file).write_text(
                f"{joules} J {1_700_000_000_000_000 + self.words['freshness'] * 100_000} us\n"
            )
        for file, word in self.words.items():
            (self.root / file).write_text(f"{word}\n")

    def update(self, **used: int) -> None:
        """One update of the hardware."""
        for file, joules in used.items():
            self.joules[file] += joules
        self.words["freshness"] += 1
        self.write()

    def sleep(self, clock: FakeClock):
        """Return a sleep during which the hardware keeps updating."""

        def sleep(seconds: float) -> None:
            clock.sleep(seconds)
            self.update()

        return sleep


class FakeNvml:
    """The calls of pynvml that NVIDIA documents, on GPUs given as {uuid: millijoules}."""

    class NVMLError(Exception):
        pass

    def __init__(self, energy: dict[str, int]) -> None:
        self.energy = energy

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.energy)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return list(self.energy)[index]

    def nvmlDeviceGetUUID(self, handle: str) -> str:  # noqa: N802
        return handle

    def nvmlDeviceGetName(self, handle: str) -> str:  # noqa: N802
        return "NVIDIA H100"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        return self.energy[handle]


class FakeAmdSmi:
    """The calls of amdsmi that AMD documents, on dies given as {PCI address: accumulator}."""

    class AmdSmiException(Exception):
        pass

    def __init__(self, dies: dict[str, int], name: str) -> None:
        self.dies, self.name = dies, name

    def amdsmi_init(self) -> None:
        pass

    def amdsmi_get_processor_handles(self) -> list[str]:
        return list(self.dies)

    def amdsmi_get_gpu_device_bdf(self, handle: str) -> str:
        return handle

    def amdsmi_get_gpu_asic_info(self, handle: str) -> dict[str, str]:
        return {"market_name": self.name}

    def amdsmi_get_energy_count(self, handle: str) -> dict[str, float]:
        return {"energy_accumulator": self.dies[handle], "counter_resolution": 15.3, "timestamp": 1}
