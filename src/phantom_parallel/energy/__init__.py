"""Energy measurement: sensors where there are some, a labelled model where there are none. Start with `meter`.

Every figure has a provenance (counter, integrated_power, modelled, unavailable) and a scope (device, node).
"""

from phantom_parallel.energy.meter import EnergyMeter, Window
from phantom_parallel.energy.power import PowerProfile, load_power_profile
from phantom_parallel.energy.results import (
    Component,
    EnergyTotal,
    Provenance,
    Scope,
    SensorEnergy,
    TimeSplit,
    WindowResult,
    format_joules,
    format_share,
)
from phantom_parallel.energy.sensors import Discovery, discover

__all__ = [
    "Component",
    "Discovery",
    "EnergyMeter",
    "EnergyTotal",
    "PowerProfile",
    "Provenance",
    "Scope",
    "SensorEnergy",
    "TimeSplit",
    "Window",
    "WindowResult",
    "discover",
    "format_joules",
    "format_share",
    "load_power_profile",
]
