"""Power profiles: their checks, those of hardware profiles, and CPU cores that ranks share."""

import pytest

from phantom_parallel.cost.hardware import load_profile
from phantom_parallel.energy import PowerProfile


def test_a_hardware_profiles_watts_become_a_power_profile():
    watts = PowerProfile.from_hardware(load_profile("dgx-a100"))
    assert (watts.compute_watts, watts.communication_watts, watts.idle_watts) == (340.0, 160.0, 48.0)
    assert "dgx-a100" in watts.source


def test_a_hardware_profile_without_watts_is_an_error(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "dgx-a100"\npower = "unavailable"\n')
    with pytest.raises(ValueError, match="'mine' has no watts"):
        PowerProfile.from_hardware(load_profile(path))


def test_the_model_is_seconds_times_watts():
    profile = PowerProfile("toy", 100.0, 40.0, 10.0, source="made up")
    assert profile.joules(compute_seconds=6.0, communication_seconds=2.0, idle_seconds=5.0) == 600 + 80 + 50


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compute_watts": -1.0}, "compute_watts must be 0 W or more, got -1.0"),
        ({"communication_watts": float("nan")}, "communication_watts must be 0 W or more, got nan"),
        ({"idle_watts": 50.0}, "idle_watts=50.0 is above what the device draws at work"),
        ({"source": ""}, "source must say where the watts come from"),
    ],
)
def test_invalid_profiles_are_rejected(change, message):
    right = {"name": "toy", "compute_watts": 100.0, "communication_watts": 40.0, "idle_watts": 10.0, "source": "x"}
    with pytest.raises(ValueError, match=message):
        PowerProfile(**(right | change))
