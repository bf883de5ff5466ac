"""Energy measurement: sensors where there are some, a labelled model where there are none. Start with `meter`.

Every figure has a provenance: counter, integrated_power, modelled, unavailable.
"""

from phantom_parallel.energy.meter import EnergyMeter
from phantom_parallel.energy.power import PowerProfile, load_power_profile
from phantom_parallel.energy.results import Provenance, WindowResult
from phantom_parallel.energy.sensors import discover

__all__ = ["EnergyMeter", "PowerProfile", "Provenance", "WindowResult", "discover", "load_power_profile"]
