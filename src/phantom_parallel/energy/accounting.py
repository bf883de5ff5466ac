"""What people do with joules: per sample and step, gross and net of idle, with the facility, in grams and money; and
where a saving came from.
"""

import math
from dataclasses import dataclass

from phantom_parallel.energy.readings import Provenance, Scope, Total, WindowResult

JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True)
class Factors:
    """The user's own factors; what is not given is not computed.

    Args:
        pue: facility energy over computer energy (power usage effectiveness), 1 or more.
        grams_per_kwh: CO2 equivalent of the electricity.
        price_per_kwh: in ``currency``.
    """

    pue: float | None = None
    grams_per_kwh: float | None = None
    price_per_kwh: float | None = None
    currency: str = ""

    def __post_init__(self) -> None:
        if self.pue is not None and not (math.isfinite(self.pue) and self.pue >= 1):
            raise ValueError(f"pue is facility energy over computer energy, so 1 or more, got {self.pue}")
        for name in ("grams_per_kwh", "price_per_kwh"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be 0 or more, got {value}")


@dataclass(frozen=True)
class Account:
    """A window's energy in the units that people ask for. None: not given, or unavailable."""

    window: str
    scope: Scope
    provenance: Provenance
    valid: bool
    reason: str
    seconds: float
    gross_joules: float | None
    net_joules: float | None  # gross less what the same devices draw when idle, for as long
    facility_joules: float | None  # gross times PUE
    grams_co2: float | None  # of the facility where a PUE is given, else of gross
    price: float | None  # likewise
    currency: str
    steps: int | None
    samples: int | None

    @property
    def joules_per_step(self) -> float | None:
        return _per(self.gross_joules, self.steps)

    @property
    def net_joules_per_step(self) -> float | None:
        return _per(self.net_joules, self.steps)

    @property
    def joules_per_sample(self) -> float | None:
        return _per(self.gross_joules, self.samples)

    @property
    def net_joules_per_sample(self) -> float | None:
        return _per(self.net_joules, self.samples)


def account(
    result: WindowResult,
    *,
    samples: int | None = None,
    steps: int | None = None,
    idle: float | WindowResult | None = None,
    factors: Factors | None = None,
) -> Account:
    """A window's account.

    Args:
        samples: how many samples or tokens it worked through, over all ranks.
        steps: how many steps; by default those that the window counted.
        idle: watts of the same devices with nothing to do, or a window that measured them so.
        factors: of the facility, the electricity and its price.
    """
    for name, count in (("samples", samples), ("steps", steps)):
        if count is not None and count < 1:
            raise ValueError(f"{name} must be 1 or more, got {count}")
    factors = factors or Factors()
    total = result.total
    gross = total.joules
    net = None if idle is None or gross is None else gross - _idle_watts(idle, total) * total.seconds
    facility = None if gross is None or factors.pue is None else gross * factors.pue
    paid = gross if facility is None else facility
    return Account(
        window="/".join(result.path),
        scope=total.scope,
        provenance=total.provenance,
        valid=total.valid,
        reason=total.reason,
        seconds=total.seconds,
        gross_joules=gross,
        net_joules=net,
        facility_joules=facility,
        grams_co2=_priced(paid, factors.grams_per_kwh),
        price=_priced(paid, factors.price_per_kwh),
        currency=factors.currency,
        steps=steps or result.steps or None,
        samples=samples,
    )


@dataclass(frozen=True)
class Saving:
    """What one window used less than another, and why. from_shorter_time + from_lower_power = joules."""

    scope: Scope
    provenance: Provenance
    joules: float
    ratio: float  # the other's energy over the baseline's
    from_shorter_time: float
    from_lower_power: float


def saving(baseline: WindowResult, other: WindowResult) -> Saving:
    """Split a saving into shorter time and lower power.

        E1 - E2 = (T1 - T2) (P1 + P2) / 2  +  (P1 - P2) (T1 + T2) / 2

    The split is exact and treats the two alike: neither effect is given the part that is due to both.
    """
    before, after = _comparable(baseline), _comparable(other)
    if (before.scope, before.provenance) != (after.scope, after.provenance):
        raise ValueError(
            f"a saving compares like with like: {baseline.name} is {before.provenance} of the {before.scope}, "
            f"{other.name} is {after.provenance} of the {after.scope}"
        )
    assert before.joules is not None
    assert after.joules is not None
    power_before, power_after = before.joules / before.seconds, after.joules / after.seconds
    return Saving(
        before.scope,
        before.provenance,
        joules=before.joules - after.joules,
        ratio=after.joules / before.joules,
        from_shorter_time=(before.seconds - after.seconds) * (power_before + power_after) / 2,
        from_lower_power=(power_before - power_after) * (before.seconds + after.seconds) / 2,
    )


def _comparable(result: WindowResult) -> Total:
    total = result.total
    if total.joules is None or not total.valid:
        raise ValueError(f"window {'/'.join(result.path)} has no valid figure to compare: {total.reason}")
    if not (total.joules > 0 and total.seconds > 0):
        raise ValueError(
            f"window {'/'.join(result.path)} has {total.joules} J in {total.seconds} s: nothing to compare"
        )
    return total


def _idle_watts(idle: float | WindowResult, total: Total) -> float:
    if not isinstance(idle, WindowResult):
        if not (math.isfinite(idle) and idle >= 0):
            raise ValueError(f"idle must be 0 W or more, got {idle}")
        return idle
    resting = _comparable(idle)
    if (resting.scope, resting.provenance, resting.sensors) != (total.scope, total.provenance, total.sensors):
        raise ValueError(
            f"the idle window {idle.name} must measure what the other does, {total.provenance} of the {total.scope} "
            f"by {', '.join(total.sensors)}; it has {resting.provenance} of the {resting.scope} "
            f"by {', '.join(resting.sensors)}"
        )
    assert resting.mean_watts is not None
    return resting.mean_watts


def _per(joules: float | None, count: int | None) -> float | None:
    return None if joules is None or count is None else joules / count


def _priced(joules: float | None, per_kwh: float | None) -> float | None:
    return None if joules is None or per_kwh is None else joules / JOULES_PER_KWH * per_kwh
