"""Files and folders appear whole or not at all, with the permissions of the umask, and dead processes keep no lock."""

import json
import math
import os
import signal
import stat
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from phantom_parallel.utils import files
from phantom_parallel.utils.files import (
    FolderLock,
    atomic_file,
    atomic_folder,
    json_text,
    remove_scratch,
    write_bytes,
    write_json,
)


def permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def contents(folder: Path) -> dict[str, str]:
    """All files below a folder, hidden ones as well."""
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_file_appears_when_the_block_ends(tmp_path):
    path = tmp_path / "new" / "a.bin"
    with atomic_file(path) as file:
        file.write(b"one")
        file.flush()
        assert not path.exists()
    assert contents(tmp_path) == {"new/a.bin": "one"}
    write_bytes(path, b"two")
    assert contents(tmp_path) == {"new/a.bin": "two"}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("before", [{}, {"a.txt": "old"}], ids=["new", "overwritten"])
def test_a_file_that_is_not_finished_leaves_the_folder_as_it_was(tmp_path, before, error):
    for name, text in before.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(error), atomic_file(tmp_path / "a.txt") as file:  # noqa: PT012
        file.write(b"half")
        raise error
    assert contents(tmp_path) == before


@pytest.mark.parametrize("fails", [False, True])
def test_a_folder_is_replaced_as_a_whole_or_left_as_it_was(tmp_path, fails):
    path = tmp_path / "folder"
    path.mkdir()
    (path / "old.txt").write_text("old")
    with pytest.raises(RuntimeError) if fails else nullcontext(), atomic_folder(path) as folder:
        (folder / "new.txt").write_text("new")
        assert contents(path) == {"old.txt": "old"}
        if fails:
            raise RuntimeError
    assert contents(tmp_path) == ({"folder/old.txt": "old"} if fails else {"folder/new.txt": "new"})


def test_a_folder_that_is_replaced_exists_at_any_moment(tmp_path):
    for name in ("first", "folder"):
        (tmp_path / name).mkdir()
    if not files._exchange(tmp_path / "first", tmp_path / "folder"):
        pytest.skip("the system cannot exchange names")
    missing, done = [], threading.Event()

    def watch():
        while not done.is_set():
            missing.append(not (tmp_path / "folder").exists())

    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(50):
        with atomic_folder(tmp_path / "folder") as scratch:
            (scratch / "file").write_text(str(number))
    done.set()
    watcher.join()
    assert missing
    assert not any(missing)


KILLED = """
import os, signal, sys
from pathlib import Path
from phantom_parallel.utils.files import atomic_file, atomic_folder

path = Path(sys.argv[1])
with atomic_file(path / "a.txt") as file, atomic_folder(path / "folder") as folder:
    file.write(b"half")
    file.flush()
    (folder / "new.txt").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_writer_that_is_killed_leaves_the_old_files_and_scratch_that_is_removed(tmp_path):
    (tmp_path / "folder").mkdir()
    before = {"a.txt": "old", "folder/old.txt": "old", ".writing.txt": "a user's own"}
    for name, text in before.items():
        (tmp_path / name).write_text(text)
    assert subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False).returncode == -signal.SIGKILL
    left = contents(tmp_path)
    assert before.items() <= left.items()
    assert len(left) == len(before) + 2
    (tmp_path / ".writing-link").symlink_to(tmp_path / "folder")
    remove_scratch(tmp_path)
    assert contents(tmp_path) == before


def test_json_files_and_text_are_valid_json(tmp_path):
    value = {"a": [1.5, math.nan, (math.inf, -math.inf)], "b": {"c": math.nan, "d": None}, "e": "NaN", "f": True}
    assert json.loads(json_text(value)) == {
        "a": [1.5, None, [None, None]],
        "b": {"c": None, "d": None},
        "e": "NaN",
        "f": True,
    }
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", value)
    assert contents(tmp_path) == {}
    write_json(tmp_path / "a.json", {"a": 1})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1}


HOLD = """
import sys, time
from pathlib import Path
from phantom_parallel.utils.files import FolderLock
lock = FolderLock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
time.sleep(60)
"""


def test_a_process_that_was_killed_does_not_keep_its_lock(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    try:
        with pytest.raises(BlockingIOError, match=f"{tmp_path} is in use"):
            FolderLock(tmp_path).acquire()
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with FolderLock(tmp_path) as lock:
        lock.acquire()
        assert permissions(tmp_path / FolderLock.NAME) == 0o600
        with pytest.raises(BlockingIOError, match="is in use"):
            FolderLock(tmp_path).acquire()
    FolderLock(tmp_path).acquire()
