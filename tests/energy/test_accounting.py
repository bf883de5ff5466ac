"""Joules per sample, net of idle, with the facility, in grams and money; savings; CSV and JSON."""

import csv
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phantom_parallel.cost.hardware import load_profile
from phantom_parallel.energy import (
    EnergyMeter,
    Factors,
    Part,
    PowerProfile,
    Provenance,
    Row,
    Scope,
    Split,
    TimelinePoint,
    WindowResult,
    account,
    saving,
    write_csv,
    write_json,
    write_timeline_csv,
)
from tests.energy.simulated import FakeClock


def window(joules: float | None, seconds: float = 10.0, name: str = "train", **kwargs) -> WindowResult:
    kind = kwargs.pop("kind", Provenance.COUNTER) if joules is not None else Provenance.UNAVAILABLE
    valid, reason = (joules is not None), ("" if joules is not None else "no permission")
    valid, reason = kwargs.pop("doubt", (valid, reason))
    row = Row("host", "x/0", "GPU 0", Part.GPU, Scope.DEVICE, kind, joules, seconds, 0, valid, reason)
    return WindowResult(name, (name,), seconds, Scope.DEVICE, (row,), **kwargs)


def test_joules_per_sample_and_step_gross_and_net():
    told = account(window(3600.0, steps=20), samples=100, idle=window(500.0, name="idle"))
    assert (told.gross_joules, told.net_joules) == (3600.0, 3100.0)
    assert (told.joules_per_sample, told.net_joules_per_sample) == (36.0, 31.0)
    assert (told.joules_per_step, told.net_joules_per_step) == (180.0, 155.0)
    assert account(window(3600.0), idle=50.0).net_joules == 3100.0


def test_what_was_not_given_is_not_computed():
    told = account(window(3600.0))
    blank = (told.net_joules, told.facility_joules, told.grams_co2, told.price, told.joules_per_sample)
    assert blank == (None,) * 5
    assert told.joules_per_step is None


def test_facility_carbon_and_price_come_from_the_users_factors():
    factors = Factors(pue=1.5, grams_per_kwh=400.0, price_per_kwh=0.2, currency="EUR")
    told = account(window(3.6e6), factors=factors)
    assert (told.facility_joules, told.grams_co2, told.currency) == (5.4e6, 600.0, "EUR")
    assert told.price == pytest.approx(0.3)
    assert account(window(3.6e6), factors=Factors(grams_per_kwh=400.0)).grams_co2 == 400.0


def test_an_unavailable_window_has_no_account_to_give():
    told = account(window(None), samples=10, idle=5.0, factors=Factors(1.2, 400.0, 0.2))
    figures = (told.gross_joules, told.net_joules, told.facility_joules, told.grams_co2, told.price)
    assert figures == (None,) * 5
    assert told.joules_per_sample is None
    assert (told.valid, told.provenance) == (False, Provenance.UNAVAILABLE)
    assert "no permission" in told.reason


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Factors(pue=0.9), "pue is facility energy over computer energy, so 1 or more, got 0.9"),
        (lambda: Factors(grams_per_kwh=-1.0), "grams_per_kwh must be 0 or more, got -1.0"),
        (lambda: account(window(1.0), samples=0), "samples must be 1 or more, got 0"),
        (lambda: account(window(1.0), idle=-5.0), "idle must be 0 W or more, got -5.0"),
        (lambda: account(window(1.0), idle=window(1.0, kind=Provenance.MODELLED)), "must measure what the other does"),
        (lambda: account(window(1.0), idle=window(None)), "no valid figure to compare: GPU 0: no permission"),
        (lambda: saving(window(1.0), window(None, name="b")), "window b has no valid figure"),
        (lambda: saving(window(1.0, doubt=(False, "too short")), window(1.0)), "too short"),
        (lambda: saving(window(1.0), window(1.0, kind=Provenance.MODELLED)), "compares like with like"),
        (lambda: saving(window(0.0), window(1.0)), "nothing to compare"),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_saving_by_time_alone_or_power_alone_is_that():
    faster = saving(window(1000.0, 10.0), window(500.0, 5.0))
    assert (faster.joules, faster.from_shorter_time, faster.from_lower_power, faster.ratio) == (500, 500, 0, 0.5)
    cooler = saving(window(1000.0, 10.0), window(500.0, 10.0))
    assert (cooler.from_shorter_time, cooler.from_lower_power) == (0, 500)


figures = st.floats(1e-3, 1e6)


@given(figures, figures, figures, figures)
def test_the_split_of_a_saving_adds_up_and_is_the_same_from_either_side(e1, t1, e2, t2):
    there, back = saving(window(e1, t1), window(e2, t2)), saving(window(e2, t2), window(e1, t1))
    scale = (abs(t1) + abs(t2)) * (e1 / t1 + e2 / t2)
    assert there.from_shorter_time + there.from_lower_power == pytest.approx(e1 - e2, abs=1e-9 * scale)
    assert there.from_shorter_time == pytest.approx(-back.from_shorter_time, abs=1e-9 * scale)


SPLITS = (Split(0, "host", 6.0, 3.0, 1.0), Split(1, "host", 5.0, 4.0, 1.0))
POINTS = (TimelinePoint("host", "x/0", 0.5, 120.0),)


def test_json_keeps_provenance_scope_and_null(tmp_path):
    write_json(tmp_path / "new" / "energy.json", [window(123.0, splits=SPLITS, timeline=POINTS), window(None)])
    first, second = json.loads((tmp_path / "new" / "energy.json").read_text())
    assert first["total"]["joules"] == 123.0
    assert (first["total"]["provenance"], first["total"]["scope"]) == ("counter", "device")
    assert first["splits"][1] == {"rank": 1, "host": "host", "compute": 5.0, "communication": 4.0, "idle": 1.0}
    assert first["timeline"] == [{"host": "host", "sensor": "x/0", "seconds": 0.5, "watts": 120.0}]
    assert first["rows"][0]["watts"] == 12.3
    assert second["total"]["joules"] is None
    assert second["total"]["provenance"] == "unavailable"


def test_csv_says_unavailable_and_tells_totals_from_sensors(tmp_path):
    write_csv(tmp_path / "energy.csv", [window(123.0, splits=SPLITS), window(None, name="other")])
    with open(tmp_path / "energy.csv", newline="") as file:
        records = list(csv.DictReader(file))
    assert [record["record"] for record in records] == ["total", "sensor", "split", "split", "total", "sensor"]
    assert (records[0]["joules"], records[0]["provenance"]) == ("123.0", "counter")
    assert (records[4]["joules"], records[5]["joules"]) == ("unavailable", "unavailable")
    assert (records[3]["communication_seconds"], records[3]["joules"]) == ("4.0", "")


def test_a_timeline_is_a_table_of_its_own(tmp_path):
    write_timeline_csv(tmp_path / "power.csv", window(1.0, timeline=POINTS))
    assert (tmp_path / "power.csv").read_text() == "host,sensor,seconds,watts\nhost,x/0,0.5,120.0\n"


def test_a_machine_with_nothing_exports_that(tmp_path):
    clock = FakeClock()
    with EnergyMeter(sources=[], clock=clock, device="cpu").window("load") as measured:
        clock.now += 1.0
    write_csv(tmp_path / "energy.csv", measured.result)
    assert "load,total,,,,,,device,unavailable,unavailable,1.0,unavailable" in (tmp_path / "energy.csv").read_text()


def test_modelled_figures_are_never_written_without_the_word(tmp_path):
    clock = FakeClock()
    profile = PowerProfile("toy", 100.0, 40.0, 10.0, source="made up")
    with EnergyMeter(sources=[], clock=clock, device="cpu", profile=profile).window("load") as measured:
        clock.now += 1.0
    write_csv(tmp_path / "energy.csv", measured.result)
    with open(tmp_path / "energy.csv", newline="") as file:
        assert all(r["provenance"] == "modelled" for r in csv.DictReader(file) if r["joules"])


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "energy.json"
    write_json(path, window(1.0))
    before = path.read_text()

    def fail(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        write_json(path, window(2.0))
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["energy.json"]


def test_a_hardware_profiles_watts_become_a_power_profile():
    watts = PowerProfile.of(load_profile("dgx-a100"))
    assert (watts.compute_watts, watts.communication_watts, watts.idle_watts) == (340.0, 160.0, 48.0)
    assert "dgx-a100" in watts.source


def test_a_hardware_profile_without_watts_is_an_error(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "dgx-a100"\npower = "unavailable"\n')
    with pytest.raises(ValueError, match="'mine' has no watts"):
        PowerProfile.of(load_profile(path))
