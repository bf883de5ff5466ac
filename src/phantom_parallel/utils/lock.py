"""A lock on a folder, so that two runs do not write into it."""

from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from filelock import FileLock, Timeout


class FolderLock:
    """A lock on the folder of a run, which a process that has died does not keep.

    The first process of a run acquires it; the ranks that it launches `join`, so that the folder stays locked until
    they have ended as well, whatever became of the first process. Locks are files in the folder that their owner alone
    can read.

    Args:
        folder: The folder, which must exist when the lock is acquired.
    """

    NAME: ClassVar[str] = ".lock"
    RANKS: ClassVar[str] = f"{NAME}-ranks"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._main, self._ranks = (FileLock(folder / name, mode=0o600) for name in (self.NAME, self.RANKS))

    def acquire(self, patience: float = 20.0) -> None:
        """Lock the folder for this process and those that join it.

        Args:
            patience: Seconds to wait for ranks whose first process has died, which are about to end.

        Raises:
            BlockingIOError: If another run holds it.
        """
        try:
            self._main.acquire(timeout=0)
            self._ranks.acquire(timeout=patience)
            self._ranks.release()
        except Timeout:
            self.release()
            raise BlockingIOError(
                f"{self._folder} is in use by another process: wait until it has ended, or choose another folder"
            ) from None

    def join(self) -> None:
        """Keep the folder locked until this rank has ended, or another one that was first."""
        with suppress(Timeout):
            self._ranks.acquire(timeout=0)

    def release(self) -> None:
        """Unlock the folder as far as this process is concerned."""
        self._main.release()
        self._ranks.release()

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    @property
    def held(self) -> bool:
        """Whether this process holds the lock."""
        return self._main.is_locked or self._ranks.is_locked
