"""The model for machines without sensors: measured seconds times a profile's watts.

    E_r = compute_r P_compute + communication_r P_communication + idle_r P_idle        for each rank r

The seconds are as measured in the window (see `split`), the watts are the profile's, of one rank's device. The sum over
ranks is right where each rank has a device of its own.
"""

import math
from dataclasses import dataclass
from typing import Self

from phantom_parallel.cost.hardware import Profile, load_profile
from phantom_parallel.energy.readings import Part, Provenance, Row, Scope, Split


@dataclass(frozen=True)
class PowerProfile:
    """What one rank's device draws while it computes, waits for an exchange, or has nothing to do."""

    name: str
    compute_watts: float
    communication_watts: float
    idle_watts: float
    source: str  # where the figures come from: a measurement, a data sheet

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
    def of(cls, hardware: Profile) -> Self:
        """The watts of a hardware profile; an error where it has none."""
        compute, communication, idle = hardware.compute_watts, hardware.communication_watts, hardware.idle_watts
        if compute is None or communication is None or idle is None:
            raise ValueError(
                f"hardware profile {hardware.name!r} has no watts: give compute_watts, communication_watts and "
                "idle_watts in a profile of your own, or calibrate with --watts"
            )
        source = f"hardware profile {hardware.name!r}: {compute.source}; {communication.source}; {idle.source}"
        return cls(hardware.name, compute.value, communication.value, idle.value, source)

    def joules(self, split: Split) -> float:
        """The modelled energy of one rank."""
        return (
            split.compute * self.compute_watts
            + split.communication * self.communication_watts
            + split.idle * self.idle_watts
        )


# For machines that nobody has measured. Ratios between strategies rest on the share that a blocked core draws of a busy
# one, which here is about that of the accelerators in the hardware profiles.
ASSUMED_CORE = PowerProfile(
    "assumed-core",
    10.0,
    5.0,
    2.0,
    "assumed, not measured: a CPU core at work 10 W, blocked in an exchange 5 W, idle 2 W",
)


def power_of(profile: str | None) -> PowerProfile:
    """The watts of a hardware profile by name, or those assumed of a CPU's core."""
    return ASSUMED_CORE if profile is None else PowerProfile.of(load_profile(profile))


def modelled_row(split: Split, profile: PowerProfile) -> Row:
    """One rank's device, as the profile has it."""
    return Row(
        host=split.host,
        sensor=f"model/rank {split.rank}",
        label=f"rank {split.rank} ({profile.name})",
        part=Part.OTHER,
        scope=Scope.DEVICE,
        provenance=Provenance.MODELLED,
        joules=profile.joules(split),
        seconds=split.seconds,
        rank=split.rank,
    )
