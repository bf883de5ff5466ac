"""Folders that take the place of others."""

import threading

import pytest

from phantom_parallel.utils import files
from phantom_parallel.utils.files import atomic_folder, replace_folder


def make(path, text):
    path.mkdir()
    (path / "file").write_text(text)
    return path


@pytest.mark.parametrize("exchange", [True, False], ids=["exchanged", "renamed twice"])
def test_the_new_folder_takes_the_place_and_the_old_one_is_gone(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    make(tmp_path / "old", "before")
    replace_folder(make(tmp_path / "new", "after"), tmp_path / "old")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old" / "file").read_text() == "after"


def test_the_name_exists_at_any_moment(tmp_path):
    if not files._exchange(make(tmp_path / "first", "0"), make(tmp_path / "folder", "0")):
        pytest.skip("the system cannot exchange names")
    missing, done = [], threading.Event()

    def watch():
        while not done.is_set():
            try:
                (tmp_path / "folder" / "file").read_text()
            except FileNotFoundError:
                missing.append((tmp_path / "folder").exists())

    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(100):
        with atomic_folder(tmp_path / "folder", overwrite=True) as scratch:
            (scratch / "file").write_text(str(number))
    done.set()
    watcher.join()
    assert not [there for there in missing if not there]
