"""A window's result as plain data: every figure keeps its provenance, and an unavailable one is null."""

import json

from phantom_parallel.energy import EnergyMeter, PowerProfile, Provenance, Scope, WindowResult
from phantom_parallel.energy.results import Component, SensorEnergy, TimeSplit
from tests.energy.simulated import FakeClock

SPLITS = (TimeSplit(0, "host", 6.0, 3.0, 1.0), TimeSplit(1, "host", 5.0, 4.0, 1.0))


def window(joules: float | None, **kwargs) -> WindowResult:
    kind = Provenance.UNAVAILABLE if joules is None else Provenance.COUNTER
    reason = "no permission" if joules is None else ""
    row = SensorEnergy(
        "host", "x/0", "GPU 0", Component.GPU, Scope.DEVICE, kind, joules, 10.0, 0, joules is not None, reason
    )
    return WindowResult("train", ("train",), 10.0, Scope.DEVICE, (row,), **kwargs)


def written(result: WindowResult) -> dict:
    return json.loads(json.dumps(result.to_dict(), allow_nan=False))


def test_json_keeps_provenance_scope_and_null():
    first, second = written(window(123.0, time_splits=SPLITS)), written(window(None))
    assert first["total"]["joules"] == 123.0
    assert (first["total"]["provenance"], first["total"]["scope"]) == ("counter", "device")
    assert first["time_splits"][1] == {
        "rank": 1,
        "host": "host",
        "compute_seconds": 5.0,
        "communication_seconds": 4.0,
        "idle_seconds": 1.0,
    }
    assert first["rows"][0]["watts"] == 12.3
    assert second["total"]["joules"] is None
    assert second["total"]["provenance"] == "unavailable"


def test_modelled_figures_are_never_written_without_the_word():
    clock = FakeClock()
    profile = PowerProfile("toy", 100.0, 40.0, 10.0, source="made up")
    with EnergyMeter(sources=[], clock=clock, device="cpu", profile=profile).window("load") as measured:
        clock.now += 1.0
    plain = written(measured.result)
    figures = [plain["total"], *plain["totals"], *plain["rows"]]
    assert [figure["joules"] for figure in figures] == [100.0] * 3
    assert {figure["provenance"] for figure in figures} == {"modelled"}
    assert plain["rows"][0]["watts_source"] == "made up"
