"""Integrates sampled power, for devices that report watts but have no energy counter."""

from phantom_parallel.energy.sensors.base import EnergySample

SAMPLE_SECONDS = 0.1  # seconds between power samples
MAX_GAP_SECONDS = 1.0  # over a longer gap, the power in between would be a guess


class PowerIntegrator:
    """Trapezoidal rule over power samples, as a running total of joules."""

    def __init__(self) -> None:
        self._joules = 0.0
        self._last: tuple[float, float] | None = None
        self._epoch = "sampled power"

    def add(self, watts: float, now: float) -> EnergySample:
        """Add a power sample taken at ``now`` and return the total."""
        if self._last is not None:
            last_time, last_watts = self._last
            elapsed = now - last_time
            self._joules += elapsed * (last_watts + watts) / 2
            if elapsed > MAX_GAP_SECONDS:
                self._epoch = f"no power sample for {elapsed:.3g} s up to {now:.3f}"
        self._last = (now, watts)
        return EnergySample(now, self._joules, self._epoch)
