"""The energy of trainings by Lightning."""

from typing import Any

from lightning.pytorch import Callback

from phantom_parallel.energy.meter import RunningEnergy

__all__ = ["EnergyCallback"]


class EnergyCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Logs the joules of a training so far, every ``log_every_n_steps`` steps. Checkpoints store them.

    Args:
        profile: Power profile to model energy with where there are no sensors, as for `EnergyMeter`.

    Example::

        Trainer(callbacks=[EnergyCallback()])
    """

    def __init__(self, profile: str | None = None) -> None:
        self._energy = RunningEnergy(profile)
        self._running = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._energy.start(self._energy.joules)
        self._running = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step % trainer.log_every_n_steps == 0:
            pl_module.log_dict(self._energy.read(), rank_zero_only=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._energy.stop()
        self._running = False

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._running = False

    def state_dict(self) -> dict[str, Any]:
        if self._running:
            self._energy.read()
        return {"joules": dict(self._energy.joules)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._energy.joules = dict(state_dict["joules"])
