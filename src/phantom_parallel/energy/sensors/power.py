"""Power made energy: for devices that tell watts but have no energy counter."""

from phantom_parallel.energy.sensors.base import Sample

SAMPLE_SECONDS = 0.1  # how often power is to be read
LONGEST_GAP = 1.0  # seconds: over a longer one, the power in between is a guess


class PowerIntegrator:
    """The trapezoid rule over power readings, as a running total of joules."""

    def __init__(self) -> None:
        self._joules = 0.0
        self._last: tuple[float, float] | None = None
        self._epoch = "sampled power"

    def add(self, watts: float, now: float) -> Sample:
        """Take in one reading of power; the joules so far."""
        if self._last is not None:
            then, before = self._last
            self._joules += (now - then) * (before + watts) / 2
            if now - then > LONGEST_GAP:
                self._epoch = f"no power sample for {now - then:.3g} s up to {now:.3f}"
        self._last = (now, watts)
        return Sample(now, self._joules, self._epoch)
