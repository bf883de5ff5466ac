"""Writing in the background: a thread on every rank, while the main thread goes on training."""

import threading
from collections.abc import Callable
from pathlib import Path

from phantom_parallel.checkpoint.parts import Group, storage_group

_GRACE = 1.0  # seconds that a failed run waits for a write under way


class BackgroundWriter:
    """Runs one write at a time in a thread, on all ranks alike, with a process group of its own.

    The ranks' threads talk through that group, so they do not disturb the exchanges of training, and a write ends the
    same way on every rank: `failed` becomes True on all ranks after one of them failed, at slightly different times.

    Args:
        ranks: All ranks that write; None for one process.
    """

    def __init__(self, ranks: Group) -> None:
        self.group = storage_group(ranks)
        self._thread: threading.Thread | None = None
        self._result: Path | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], Path]) -> None:
        """Run ``work`` in the background, after the write before it."""
        self.wait()

        def run() -> None:
            try:
                self._result = work()
            except BaseException as error:  # raised by `wait`
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether the write under way has failed on this rank."""
        return self._error is not None

    def wait(self) -> Path | None:
        """Wait for the write under way.

        Returns:
            What the latest write returned; None if there was none.

        Raises:
            BaseException: What the write raised. It is raised once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._result

    def close(self, *, failed: bool) -> None:
        """Let a write under way end.

        Args:
            failed: Whether this rank failed, and the others perhaps with it: then it does not wait for them for long.
        """
        if self._thread is not None:
            self._thread.join(_GRACE if failed else None)
