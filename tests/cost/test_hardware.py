"""Hardware profiles: what is shipped, what a user's file may say, and what it may not."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from phantom_parallel.cost.hardware import Figure, Profile, Tier, dump_profile, list_profiles, load_profile

SHIPPED_NAMES = ("b200", "dgx-a100", "dgx-h100", "frontier-mi250x", "mi300x")


def figure(value: float) -> Figure:
    return Figure(value, "chosen for the test")


def toy(**changes: object) -> Profile:
    """A machine of round numbers: 4 devices a node, 100 FLOP/s of which 1/2 are reached, 10 B/s of memory."""
    plain: dict[str, object] = {
        "name": "toy",
        "description": "round numbers",
        "device": "none",
        "devices_per_node": 4,
        "max_devices": 1024,
        "memory_bytes": 1e9,
        "memory_bandwidth": 10,
        "write_bandwidth": 10,
        "peak": {"fp32": figure(100), "bf16": figure(400)},
        "efficiency": {"fp32": figure(0.5), "bf16": figure(0.5)},
        "product_overhead_seconds": 3,
        "layer_overhead_seconds": 0,
        "collective_overhead_seconds": 7,
        "inside": Tier(figure(2), figure(8)),
        "between": Tier(figure(5), figure(2)),
        "overlap": 1,
        "compute_watts": 10,
        "communication_watts": 4,
        "idle_watts": 1,
    }
    plain.update(changes)
    made = {name: figure(value) if isinstance(value, int | float) else value for name, value in plain.items()}
    return Profile(**made)  # type: ignore[arg-type]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's own, empty folder of profiles."""
    monkeypatch.setenv("PHANTOM_PROFILES", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", SHIPPED_NAMES)
def test_a_shipped_profile_gives_a_source_for_every_figure_and_written_loads_back_equal(name: str, own: Path) -> None:
    assert tuple(sorted(list_profiles())) == SHIPPED_NAMES
    profile = load_profile(name)
    assert profile.name == name
    assert {"fp32", "bf16"} <= set(profile.peak)
    assert all(len(given.source) > 10 for _, given, _ in profile.figures())
    assert any(given.uncertain for _, given, _ in profile.figures())
    assert profile.idle_watts.value < profile.communication_watts.value < profile.compute_watts.value
    profile = replace(profile, description='quotes " and \\ and a newline\nand é')
    dump_profile(profile, own / "copy.toml")
    assert load_profile("copy") == profile
    assert [path.name for path in own.iterdir()] == ["copy.toml"]  # no temporary file is left


def test_a_file_with_a_base_overrides_single_figures(own: Path) -> None:
    (own / "mine.toml").write_text('base = "dgx-a100"\noverlap = 0.25\n[inside]\nbandwidth = 1e9\n')
    mine, base = load_profile("mine"), load_profile("dgx-a100")
    assert mine.overlap == Figure(0.25, "given in mine.toml")
    assert mine.inside == Tier(base.inside.latency_seconds, Figure(1e9, "given in mine.toml"))
    assert replace(mine, name=base.name, overlap=base.overlap, inside=base.inside) == base


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("idle_watts = -1", "idle_watts"),
        ('overlap = { source = "me" }', "overlap: value is missing"),
        ("memory_bandwith = 1e12", "memory_bandwith"),
        ("inside = { hops = 3 }", "hops"),
        ('power = "plenty"', "power must be 'unavailable'"),
        ("overlap = [", "not readable as TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_name_and_field(own: Path, line: str, field: str) -> None:
    path = own / "wrong.toml"
    path.write_text(f'base = "dgx-a100"\n{line}\n')
    with pytest.raises(ValueError, match=re.escape(field)) as caught:
        load_profile(path)
    assert str(path) in str(caught.value)
