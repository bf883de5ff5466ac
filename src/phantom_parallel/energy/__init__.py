"""Energy: real meters where there are sensors, labelled models where there are none, and nothing invented.

Every figure carries its provenance (counter, integrated_power, modelled, unavailable) and its scope (device, node).
"""

from phantom_parallel.energy.meter import EnergyMeter, Window
from phantom_parallel.energy.model import ASSUMED_CORE, PowerProfile, power_of
from phantom_parallel.energy.readings import (
    Part,
    Provenance,
    Row,
    Scope,
    Split,
    TimelinePoint,
    Total,
    WindowResult,
    format_joules,
)
from phantom_parallel.energy.sensors import Discovery, discover

__all__ = [
    "ASSUMED_CORE",
    "Discovery",
    "EnergyMeter",
    "Part",
    "PowerProfile",
    "Provenance",
    "Row",
    "Scope",
    "Split",
    "TimelinePoint",
    "Total",
    "Window",
    "WindowResult",
    "discover",
    "format_joules",
    "power_of",
]
