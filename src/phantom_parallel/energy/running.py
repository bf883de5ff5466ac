"""The energy of a training that another library runs: what its callbacks log and store in checkpoints."""

import warnings
from contextlib import ExitStack

import torch.distributed as dist

from phantom_parallel.energy.meter import EnergyMeter
from phantom_parallel.energy.results import Provenance


class RunningEnergy:
    """Joules of a training so far. All ranks call its methods, at the same steps.

    Args:
        profile: As for `EnergyMeter`.
    """

    def __init__(self, profile: str | None = None) -> None:
        self.profile = profile
        self.joules: dict[str, float] = {}  # by provenance, as figures of different provenance are never added
        self._meter: EnergyMeter | None = None
        self._window = ExitStack()

    def start(self, joules: dict[str, float]) -> None:
        """Start with the joules of a checkpoint."""
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        self._meter = EnergyMeter(group, profile=self.profile)
        self.joules = dict(joules)
        self._open()

    def _open(self) -> None:
        assert self._meter is not None
        self._current = self._window.enter_context(self._meter.window("train"))

    def read(self) -> dict[str, float]:
        """What to log: ``joules_counter``, or another provenance, since the beginning of the training."""
        if self._meter is not None:
            self.stop()
            self._open()
        return {f"joules_{provenance}": joules for provenance, joules in self.joules.items()}

    def stop(self) -> None:
        """Add the joules since the last reading, and measure no longer."""
        self._window.close()
        total = self._current.result.total
        if total.joules is not None:
            self.joules[total.provenance.value] = self.joules.get(total.provenance.value, 0.0) + total.joules
        elif total.provenance is Provenance.UNAVAILABLE and not self.joules:
            warnings.warn(f"no joules are logged: {total.reason}", stacklevel=3)
