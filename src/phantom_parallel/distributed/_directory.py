"""A private temporary directory for a launch, which is removed with it, or by the next launch if it was killed."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "phantom-ranks-"
_LOCK = "lock"
_NEW = 60.0  # seconds in which a directory may have no lock yet


@contextmanager
def private_directory() -> Iterator[Path]:
    """Create a directory that this user alone may read, and remove it at the end."""
    _remove_abandoned()
    path = Path(tempfile.mkdtemp(prefix=PREFIX))  # mode 0700
    try:
        with (path / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # held as long as this process lives, and by no child of it
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _remove_abandoned() -> None:
    """Remove directories of launchers that were killed: nobody holds their locks."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            status = path.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < _NEW:
                continue
            with (path / _LOCK).open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # in use, or removed by another launch
            continue
