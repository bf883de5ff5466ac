import io
import json
from contextlib import redirect_stdout

import pytest

from phantom_parallel.cli.main import main
from phantom_parallel.cost.hardware import load_profile
from phantom_parallel.cost.timing import step_time
from phantom_parallel.families.registry import get_family


@pytest.fixture(autouse=True)
def own_profiles(tmp_path, monkeypatch):
    monkeypatch.setenv("PHANTOM_PROFILES", str(tmp_path / "profiles"))


def test_validation_needs_a_calibration_first(capsys):
    assert main(["machine", "check", "--ranks", "2"]) == 2
    assert "there is no profile 'this-machine-2'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["machine", "measure", "--ranks", "0"], "ranks must be positive whole numbers"),
        (["machine", "measure", "--watts", "10", "-1", "2"], "watts must not be negative"),
        (["machine", "measure", "--seconds", "0"], "seconds must be a positive number, got 0.0"),
        (["machine", "check", "--ranks"], "ranks must be positive whole numbers such as 2 4, got ()"),
        (["machine", "check", "--ranks", "0"], "ranks must be positive whole numbers"),
        (["machine", "check", "--turns", "0"], "turns must be at least 1, got 0"),
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


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """Profiles of a calibration that is as short as can be."""
    folder = tmp_path_factory.mktemp("profiles")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        patch.setenv("PHANTOM_PROFILES", str(folder))
        small = get_family("ffn").step_shapes(2, held_out=False)[:3]
        patch.setattr(type(get_family("ffn")), "step_shapes", lambda self, ranks, held_out: small)
        assert main(["machine", "measure", "--ranks", "2", "--seconds", "0.001", "--json"]) == 0
    return folder, json.loads(out.getvalue())


def test_calibration_writes_a_profile(calibrated):
    folder, written = calibrated
    profile = load_profile(folder / "this-machine-2.toml")
    assert written["this-machine-2"]["peak.fp32"] == profile.peak["fp32"].value > 0


@pytest.mark.slow
@pytest.mark.parametrize(("family", "baseline"), [("ffn", "tensor"), ("gpt", "megatron")])
def test_validation_uses_the_profile_of_calibration(capsys, monkeypatch, tmp_path, calibrated, family, baseline):
    """The whole way with short measurements: the figures are whatever they are, the files are right."""
    monkeypatch.setenv("PHANTOM_PROFILES", str(calibrated[0]))
    small = get_family(family).step_shapes(2, held_out=True)[-2:]
    monkeypatch.setattr(type(get_family(family)), "step_shapes", lambda self, ranks, held_out: small)
    assert (
        main(["machine", "check", family, "--ranks", "2", "--turns", "1", "--json", "--out", str(tmp_path / "v.json")])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "v.json").read_text())
    assert len(found["outcomes"]) == 2
    for outcome, shapes in zip(found["outcomes"], small, strict=True):
        assert outcome["setting"]["blocks"] == shapes["phantom"].blocks
        assert all(outcome["measured"][strategy] > 0 for strategy in ("phantom", baseline))
        predicted = {s: step_time(shape, load_profile("this-machine-2")).total for s, shape in shapes.items()}
        assert outcome["predicted"] == predicted
        assert outcome["predicted_ratio"] == predicted["phantom"] / predicted[baseline]
