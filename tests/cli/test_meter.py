"""``phantom machine sensors``."""

import json

import pytest

from phantom_parallel.cli import main, meter
from phantom_parallel.energy import Discovery, discover
from phantom_parallel.energy.sensors import probe_rapl
from tests.energy.simulated import two_packages


@pytest.fixture
def nothing(tmp_path, monkeypatch):
    found = discover(powercap=tmp_path, pm_counters=tmp_path)
    monkeypatch.setattr(meter, "discover", lambda: found)


@pytest.fixture
def server(tmp_path, monkeypatch):
    tree = two_packages(tmp_path / "powercap")
    found = Discovery(probe_rapl(tree.root).sources, ("file: permission denied; allow [it]",), ("install more",))
    monkeypatch.setattr(meter, "discover", lambda: found)
    monkeypatch.setattr(meter.time, "sleep", lambda seconds: tree.use("intel-rapl:0", 1.0))
    monkeypatch.setenv("COLUMNS", "200")


def test_a_machine_with_nothing_says_so_and_what_to_install(nothing, capsys):
    meter.Options(seconds=60.0).run()  # and does not wait for nothing
    output = capsys.readouterr().out
    assert "No energy sensor can be read on this machine: energy is unavailable." in output
    assert "pip install nvidia-ml-py" in output
    assert "modprobe intel_rapl_msr" in output
    assert " 0 J" not in output


def test_a_machine_with_nothing_is_null_in_json(nothing, capsys):
    meter.Options(json=True).run()
    output = json.loads(capsys.readouterr().out)
    assert output["sensors"] == []
    assert output["reading"]["total"]["joules"] is None
    assert output["reading"]["total"]["provenance"] == "unavailable"
    assert output["hints"]


def test_sensors_are_listed_with_a_reading_and_what_stands_in_the_way(server, capsys):
    meter.Options(seconds=0.02).run()
    output = capsys.readouterr().out
    assert "package-1" in output
    assert "memory of package 0" in output
    assert "device total: unavailable" in output  # package 1 stands still
    assert "allow [it]" in output  # brackets are not markup
    assert "install more" in output


def test_json_lists_the_sensors(server, capsys):
    meter.Options(seconds=0.02, json=True).run()
    output = json.loads(capsys.readouterr().out)
    assert output["sensors"][0]["id"] == "rapl/intel-rapl:0"
    assert output["problems"] == ["file: permission denied; allow [it]"]
    assert output["reading"]["rows"][0]["joules"] >= 1.0


def test_the_command_succeeds_without_a_sensor_and_refuses_nonsense(nothing, monkeypatch, capsys):
    assert main.main(["machine", "sensors", "--seconds", "1"]) == 0
    assert main.main(["machine", "sensors", "--seconds", "-1"]) == 2
    assert "--seconds must be above 0, got -1.0" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_reading_takes_time(seconds):
    with pytest.raises(ValueError, match="--seconds must be above 0"):
        meter.Options(seconds=seconds).run()
