"""Power profiles, which model energy on machines without sensors.

    E_r = compute_r P_compute + communication_r P_communication + idle_r P_idle        for each rank r

The seconds are measured (see :mod:`~phantom_parallel.energy.time_split`) and the watts are assumed, calibrated or from
a data sheet. They are those of one rank. The sum over ranks is right if each has a device of its own.
"""

import math
from dataclasses import dataclass
from typing import Self

from phantom_parallel.cost.hardware import Profile, load_profile


@dataclass(frozen=True)
class PowerProfile:
    """Power that one rank draws in each of the states that the time split tells apart.

    Args:
        name: identifies the profile in results and reports.
        compute_watts: power while the rank computes.
        communication_watts: power while the rank is blocked in the wait for a collective. It is neither idle nor full
            power, so it should be measured.
        idle_watts: power while the rank has nothing to do: between steps, or finished before the slowest rank.
        source: where the watts come from (a measurement, a data sheet, an assumption), reported with every figure.

    Example::

        profile = PowerProfile("mine", 340.0, 160.0, 48.0, source="measured with a wall meter")
        profile.joules(compute_seconds=60.0, communication_seconds=20.0, idle_seconds=5.0)
    """

    name: str
    compute_watts: float
    communication_watts: float
    idle_watts: float
    source: str

    def __post_init__(self) -> None:
        for field in ("compute_watts", "communication_watts", "idle_watts"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"power profile {self.name!r}: {field} must be 0 W or more, got {value}")
        busy = min(self.compute_watts, self.communication_watts)
        if self.idle_watts > busy:
            raise ValueError(
                f"power profile {self.name!r}: idle_watts={self.idle_watts} is above what the device draws at work "
                f"({busy}); give idle_watts of at most that"
            )
        if not self.source:
            raise ValueError(f"power profile {self.name!r}: source must say where the watts come from")

    @classmethod
    def from_hardware(cls, hardware: Profile) -> Self:
        """Return the watts of a hardware profile. Raises ValueError if it has none."""
        compute, communication, idle = hardware.compute_watts, hardware.communication_watts, hardware.idle_watts
        if compute is None or communication is None or idle is None:
            raise ValueError(
                f"hardware profile {hardware.name!r} has no watts: give compute_watts, communication_watts and "
                "idle_watts in a profile of your own, or calibrate with --watts"
            )
        source = f"hardware profile {hardware.name!r}: {compute.source}; {communication.source}; {idle.source}"
        return cls(hardware.name, compute.value, communication.value, idle.value, source)

    def joules(self, compute_seconds: float, communication_seconds: float = 0.0, idle_seconds: float = 0.0) -> float:
        """Return the modelled energy of a rank, or of several ranks if the seconds are sums over them."""
        return (
            compute_seconds * self.compute_watts
            + communication_seconds * self.communication_watts
            + idle_seconds * self.idle_watts
        )


# For machines that nobody has measured. Ratios between strategies depend on the share that a blocked core draws of a
# busy
# one, about that of the accelerators in the hardware profiles.
ASSUMED_CORE = PowerProfile(
    "assumed-core",
    10.0,
    5.0,
    2.0,
    "assumed, not measured: a CPU core draws 10 W in compute, 5 W blocked in communication and 2 W idle",
)


def load_power_profile(name: str | None = None) -> PowerProfile:
    """Load the watts of a hardware profile by name. None is the assumed power of a CPU core."""
    return ASSUMED_CORE if name is None else PowerProfile.from_hardware(load_profile(name))
