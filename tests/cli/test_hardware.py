"""``phantom machine show`` as a user meets it."""

import json
from pathlib import Path

import pytest

from phantom_parallel.cli.hardware import Options, quantity
from phantom_parallel.cost.hardware import load_profile


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PHANTOM_PROFILES", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")
    return tmp_path


def test_all_profiles_are_listed_with_their_marks(capsys: pytest.CaptureFixture[str]) -> None:
    Options().run()
    shown = capsys.readouterr().out
    for name in ("frontier-mi250x", "dgx-a100", "dgx-h100", "b200", "mi300x"):
        assert name in shown
    assert "1,307*" in shown  # MI300X in bf16, from memory
    assert " 312 " in shown  # A100 in bf16, from its sheet


def test_a_users_profile_is_listed_too(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (own / "this-machine.toml").write_text('base = "b200"\npower = "unavailable"\n')
    Options().run()
    line = next(line for line in capsys.readouterr().out.splitlines() if "this-machine" in line)
    assert line.split()[-3:] == ["-", "-", "-"]


def test_one_profile_shows_every_figure_and_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    Options("dgx-h100").run()
    shown = " ".join(capsys.readouterr().out.split())
    for name, figure, rule in load_profile("dgx-h100").figures():
        assert name in shown
        assert quantity(figure.value, rule.unit) in shown
    assert "NVIDIA H100 data sheet" in shown
    assert "989 TFLOP/s" in shown


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(1.5e-6, "s", "1.5 us"), (0, "s", "0 s"), (2e12, "B/s", "2 TB/s"), (8, "devices", "8 devices"), (0.8, "", "0.8")],
)
def test_quantities_are_readable(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


def test_json_has_every_source(capsys: pytest.CaptureFixture[str]) -> None:
    Options("mi300x", json=True).run()
    found = json.loads(capsys.readouterr().out)
    assert found["peak"]["bf16"] == {"value": 1307e12, "source": found["peak"]["bf16"]["source"], "uncertain": True}
    Options(json=True).run()
    assert len(json.loads(capsys.readouterr().out)) == 5


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="did you mean 'dgx-h100'"):
        Options("dgx-h10").run()
