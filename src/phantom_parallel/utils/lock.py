"""A lock on a folder, so that two runs do not write into it."""

import errno
import os
import socket
import time
from pathlib import Path
from typing import IO, Any, ClassVar

try:
    import fcntl
except ImportError:  # not on Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]


class FolderLock:
    """A lock on a folder that its processes share, and that a dead process does not keep.

    The first process acquires it and writes its identity into the file; the processes that work for it `join`, so that
    the folder stays locked until the last of them has ended.

    Args:
        folder: The folder, which must exist when the lock is acquired.
    """

    NAME: ClassVar[str] = ".lock"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[str] | None = None

    def acquire(self, patience: float = 20.0) -> None:
        """Lock the folder for this process and those that join it.

        Args:
            patience: Seconds to wait for processes of a holder that has died, which are about to end.

        Raises:
            BlockingIOError: If processes that run hold it; the message names the first of them.
        """
        end = time.monotonic() + patience
        file = self._open()
        while not flock(file, exclusive=True):
            holder = self._holder()
            if time.monotonic() >= end or _runs(holder):
                file.close()
                raise BlockingIOError(
                    f"{self._folder} is in use by another process ({holder or 'unknown'}): "
                    "wait until it has ended, or choose another folder"
                )
            time.sleep(0.1)
        file.truncate(0)
        file.write(f"{socket.gethostname()} pid {os.getpid()}")
        file.flush()
        self._file = file
        if not flock(file, exclusive=False):  # shared from here on, for others to join
            self.release()
            raise BlockingIOError(f"{self._folder} was locked by another process just now: choose another folder")

    def join(self) -> None:
        """Keep the folder locked until this process has ended or released it, too."""
        self._file = self._open()
        flock(self._file, exclusive=False)

    def release(self) -> None:
        """Unlock the folder as far as this process is concerned."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    @property
    def held(self) -> bool:
        """Whether this process holds the lock."""
        return self._file is not None

    def _open(self) -> IO[str]:
        """Open the lock's file, which is kept open: the lock is the file's. Others of the machine do not read it."""
        return open(os.open(self._folder / self.NAME, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "a+")

    def _holder(self) -> str:
        try:
            return (self._folder / self.NAME).read_text()
        except OSError:
            return ""


def flock(file: IO[Any] | int, *, exclusive: bool, without_locks: bool = True) -> bool:
    """Lock an open file or folder without waiting; False if others hold it. Where there are no locks, nothing is locked
    and ``without_locks`` is returned.
    """
    if fcntl is None:
        return without_locks
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EBADF):
            raise
        return without_locks
    return True


def _runs(holder: str) -> bool:
    """Whether the process that a lock names may still run: one of this host that does not is about to be gone."""
    host, _, pid = holder.partition(" pid ")
    if host != socket.gethostname() or not pid.isdigit():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
