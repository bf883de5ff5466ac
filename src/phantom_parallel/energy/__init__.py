"""Energy: real meters where there are sensors, labelled models where there are none, and nothing invented.

Every figure carries its provenance (counter, integrated_power, modelled, unavailable) and its scope (device, node).
"""

from phantom_parallel.energy.accounting import Account, Factors, Saving, account, saving
from phantom_parallel.energy.export import to_dict, to_records, write_csv, write_json, write_timeline_csv
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
    "Account",
    "Discovery",
    "EnergyMeter",
    "Factors",
    "Part",
    "PowerProfile",
    "Provenance",
    "Row",
    "Saving",
    "Scope",
    "Split",
    "TimelinePoint",
    "Total",
    "Window",
    "WindowResult",
    "account",
    "discover",
    "format_joules",
    "power_of",
    "saving",
    "to_dict",
    "to_records",
    "write_csv",
    "write_json",
    "write_timeline_csv",
]
