"""The user's cache."""

import os
import stat

from phantom_parallel.utils.cache import cache_folder, keep_compiled_code_private


def test_compiled_code_is_kept_in_the_users_own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    keep_compiled_code_private()
    folder = cache_folder() / "inductor"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "chosen")
    keep_compiled_code_private()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "chosen"


def test_without_a_place_for_a_cache_torchs_own_stays(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    keep_compiled_code_private()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == ""
