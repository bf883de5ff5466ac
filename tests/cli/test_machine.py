"""``phantom machine show``, ``measure``, ``check`` and ``sensors`` as a user meets them."""

import pytest

from phantom_parallel import energy
from phantom_parallel.cli import machine
from phantom_parallel.cli.machine import SensorsOptions, ShowOptions
from phantom_parallel.cost.hardware import load_profile
from phantom_parallel.energy import discover
from phantom_parallel.energy.sensors import Discovery, probe_rapl
from phantom_parallel.study.units import quantity
from tests.cli.commands import refused
from tests.energy.simulated import two_packages


def test_one_profile_shows_every_figure_and_its_source(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    ShowOptions("dgx-h100").run()
    shown = " ".join(capsys.readouterr().out.split())
    for name, figure, unit in load_profile("dgx-h100").figures():
        assert name in shown
        assert quantity(figure.value, unit) in shown
    assert "NVIDIA H100 data sheet" in shown
    assert "989 TFLOP/s" in shown


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["machine", "measure", "--ranks", "0"], "ranks must be a positive whole number, got 0"),
        (["machine", "check", "--ranks", "2"], "there is no profile 'this-machine-2'"),
        (["machine", "sensors", "--seconds", "-1"], "--seconds must be above 0, got -1.0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, command, message):
    assert message in refused(capsys, *command)


@pytest.fixture
def nothing(tmp_path, monkeypatch):
    discovery = discover(powercap=tmp_path, pm_counters=tmp_path)
    monkeypatch.setattr(energy, "discover", lambda: discovery)


@pytest.fixture
def server(tmp_path, monkeypatch):
    tree = two_packages(tmp_path / "powercap")
    discovery = Discovery(probe_rapl(tree.root).sources, ("file: permission denied; allow [it]",), ("install more",))
    monkeypatch.setattr(energy, "discover", lambda: discovery)
    monkeypatch.setattr(machine.time, "sleep", lambda seconds: tree.use("intel-rapl:0", 1.0))


def test_a_machine_with_nothing_says_so_and_what_to_install(nothing, capsys):
    SensorsOptions(seconds=60.0).run()  # and does not wait for nothing
    output = capsys.readouterr().out
    assert "No energy sensor can be read on this machine: energy is unavailable." in output
    assert "pip install" in output
    assert " 0 J" not in output


def test_sensors_are_listed_with_a_reading_and_what_stands_in_the_way(server, capsys):
    SensorsOptions(seconds=0.02).run()
    output = capsys.readouterr().out
    assert "package-1" in output
    assert "memory of package 0" in output
    assert "total: unavailable" in output  # package 1 stands still
    assert "allow [it]" in output  # brackets are not markup
    assert "install more" in output
