import json

import pytest

from phantom_parallel.cli.main import main
from phantom_parallel.cost.hardware import load_profile


@pytest.fixture(autouse=True)
def own_profiles(tmp_path, monkeypatch):
    monkeypatch.setenv("PHANTOM_PROFILES", str(tmp_path / "profiles"))


def test_validation_needs_a_calibration_first(capsys):
    assert main(["validate", "--ranks", "2"]) == 2
    assert "there is no profile 'this-machine-2'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["calibrate", "--ranks", "0"], "ranks must be positive whole numbers"),
        (["calibrate", "--watts", "10", "-1", "2"], "watts must not be negative"),
        (["validate", "--turns", "0"], "turns must be at least 1, got 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, command, message):
    try:
        code = main(command)
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    assert code == 2
    assert message in " ".join((captured.out + captured.err).replace("│", " ").split())
    assert "Traceback" not in captured.err


def test_calibration_writes_a_profile_that_validation_uses(capsys, monkeypatch, tmp_path):
    """The whole way with short measurements: the figures are whatever they are, the files are right."""
    from phantom_parallel.cost import validate
    from phantom_parallel.cost.settings import Setting

    monkeypatch.setattr(validate, "grid", lambda ranks: [Setting(ranks, 64, 2, 8, ranks, 2)])
    monkeypatch.setattr("phantom_parallel.cli.validate.grid", validate.grid)
    assert main(["calibrate", "--ranks", "2", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    profile = load_profile("this-machine-2")
    assert written["this-machine-2"]["peak.fp32"] == profile.peak["fp32"].value > 0
    assert main(["validate", "--ranks", "2", "--turns", "1", "--json", "--out", str(tmp_path / "v.json")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "v.json").read_text())
    assert len(found["outcomes"]) == 1
    assert found["outcomes"][0]["measured"]["phantom"] > 0
