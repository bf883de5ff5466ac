"""Writing in the background: a thread on every rank, while the main thread goes on training."""

import threading
from collections.abc import Callable
from pathlib import Path

from phantom_parallel.checkpoint.parts import Group, storage_group
from phantom_parallel.distributed.objects import all_gather_objects

_GRACE = 1.0  # seconds that a failed run waits for a write under way


class BackgroundWriter:
    """Runs one write at a time in a thread, on all ranks alike, with a process group of its own.

    The ranks' threads talk through that group, so they do not disturb the exchanges of training, and a write ends the
    same way on every rank, at slightly different times. After a failure the threads agree on the step that the ranks
    stop before: the first one that none of them has begun.

    Args:
        ranks: All ranks that write; None for one process.
    """

    def __init__(self, ranks: Group) -> None:
        self.group = storage_group(ranks)
        self._thread: threading.Thread | None = None
        self._result: Path | None = None
        self._error: BaseException | None = None
        self._begun = 0  # steps
        self._lock, self._agreed = threading.Lock(), threading.Event()
        self._last_step = 0  # that is run after a failure, once it is agreed

    def start(self, work: Callable[[], Path]) -> None:
        """Run ``work`` in the background, after the write before it."""
        self.wait()

        def run() -> None:
            try:
                self._result = work()
            except BaseException as error:  # raised by `wait`
                self._fail(error)

        self._agreed.clear()
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def begin_step(self) -> bool:
        """Count a step that is about to begin. Every rank calls this before each of its steps.

        Returns:
            False if the write under way has failed and the ranks have agreed to stop before this step.
        """
        with self._lock:
            if self._error is None:
                self._begun += 1
                return True
        self._agreed.wait()  # the other ranks' threads fail as well
        self._begun += 1
        return self._begun <= self._last_step

    def _fail(self, error: BaseException) -> None:
        with self._lock:  # no step begins until the ranks have agreed
            self._error = error
        self._last_step = self._begun
        try:
            if isinstance(error, ValueError | OSError):  # which all ranks raise together
                self._last_step = max(all_gather_objects(self._begun, self.group))
        finally:
            self._agreed.set()

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
