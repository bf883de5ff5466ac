import pytest


@pytest.fixture(autouse=True)
def profiles(tmp_path, monkeypatch):
    """A folder of this test for hardware profiles, and a terminal of the usual width."""
    monkeypatch.setenv("PHANTOM_PROFILES", str(tmp_path / "profiles"))
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path / "profiles"
