"""Power profiles: their checks, and the watts of hardware profiles."""

import pytest

from phantom_parallel.cost.hardware import load_profile
from phantom_parallel.energy import PowerProfile


def test_a_hardware_profiles_watts_become_a_power_profile():
    watts = PowerProfile.of(load_profile("dgx-a100"))
    assert (watts.compute_watts, watts.communication_watts, watts.idle_watts) == (340.0, 160.0, 48.0)
    assert "dgx-a100" in watts.source


def test_a_hardware_profile_without_watts_is_an_error(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "dgx-a100"\npower = "unavailable"\n')
    with pytest.raises(ValueError, match="'mine' has no watts"):
        PowerProfile.of(load_profile(path))
