"""Which rank is the cause when ranks of an external launch lose each other.

Local ranks are watched by their launcher (`_supervisor`). Those of ``torchrun`` or ``srun`` watch each other: every
rank writes heartbeats to the store, and one whose exchange has failed looks for ranks without any, or with an error of
their own. The error then names them on every rank, and not only the exchange that failed.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from phantom_parallel.distributed._messages import SILENT_SECONDS, Failure, place_of_thread
from phantom_parallel.distributed.errors import RankDied
from phantom_parallel.distributed.signals import StopRequest

_BEAT_SECONDS = 1.0
_STORE_SECONDS = 5.0  # that the store has to answer in after a failure: it may be the lost rank's
_KEYS = "phantom-ranks"


@contextmanager
def naming_lost_ranks(rank: int, size: int) -> Iterator[None]:
    """Raise a `RankDied` that names the cause if an exchange with another rank fails within this block.

    Every rank enters the block, with the default process group initialized. Errors of a rank's own are raised as they
    are.
    """
    store: Any = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    watch = RankWatch(store, rank, size)
    watch.start()
    try:
        yield
    except Exception as error:
        with StopRequest():  # torchrun ends the others as soon as one has left; they may still say why
            cause = watch.cause(Failure.of(error))
        if cause is None:
            raise
        raise cause from error
    finally:
        watch.stop()


class RankWatch:
    """Heartbeats of this rank, and a look at those of the others.

    Args:
        store: A connection of its own to the store of all ranks.
        rank: This rank.
        size: Number of ranks.
        beat_seconds: Time between heartbeats.
        silent_seconds: Time without a heartbeat after which a rank is taken for lost.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        beat_seconds: float = _BEAT_SECONDS,
        silent_seconds: float = max(SILENT_SECONDS, 3 * _BEAT_SECONDS),
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._beat_seconds, self._silent_seconds = beat_seconds, silent_seconds
        self._stopped, self._in_use = threading.Event(), threading.Lock()
        self._answers = True  # whether the store does

    def start(self) -> None:
        """Write heartbeats from a thread, which stops when this process is stopped."""
        watched = threading.get_ident()
        threading.Thread(target=self._beat, args=(watched,), name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Write no more heartbeats: the store may go away now."""
        self._stopped.set()
        if self._answers and self._in_use.acquire(timeout=_STORE_SECONDS):  # a write under way has ended
            self._in_use.release()

    def _beat(self, watched: int) -> None:
        number = 0
        while not self._stopped.wait(self._beat_seconds if number else 0.0):
            number += 1
            with suppress(RuntimeError):  # the store is gone, and with it its rank: the next exchange fails
                self._write("alive", {"number": number, "place": place_of_thread(watched)})

    def cause(self, failure: Failure) -> RankDied | None:
        """The error to raise for the failure of this rank; None if that is its own, which the others then know."""
        self._ask(
            lambda: self._write("failed", {"summary": failure.summary, "communication": failure.communication}),
            _STORE_SECONDS,
        )
        if not failure.communication:
            return None
        found = self._ask(self._look, self._silent_seconds + _STORE_SECONDS) if self._answers else None
        if found is not None:
            return self._verdict(failure, *found)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return RankDied(f"an exchange failed, and the store of torchrun does not answer: {failure.summary}")
        return RankDied("rank 0 did not answer in time: the store of all ranks, which it runs, is silent", lost=(0,))

    def _verdict(self, failure: Failure, alive: dict[int, Any], failed: dict[int, Any], silent: list[int]) -> RankDied:
        own = [rank for rank, about in failed.items() if not about["communication"]]
        if own:
            return RankDied(f"rank {own[0]} failed, and the others were stopped: {failed[own[0]]['summary']}")
        if silent:
            message = f"{_named(silent)} did not answer in time: no sign of life{_last_seen(silent, alive)}"
            return RankDied(message, lost=silent)
        idle = [rank for rank in range(self._size) if rank not in failed]
        if idle and failure.timed_out:
            message = f"{_named(idle)} did not answer in time: alive, but taking no part{_last_seen(idle, alive)}"
            return RankDied(message, lost=idle)
        return RankDied(f"an exchange between ranks failed, and all ranks are alive: {failure.summary}")

    def _look(self) -> tuple[dict[int, Any], dict[int, Any], list[int]]:
        """The last heartbeats, the failures, and the ranks that have neither sent a heartbeat lately nor failed."""
        before = self._read("alive")
        time.sleep(self._silent_seconds)
        alive, failed = self._read("alive"), self._read("failed")
        silent = [
            rank
            for rank in range(self._size)
            if rank not in failed and rank != self._rank and alive.get(rank) == before.get(rank)
        ]
        return alive, failed, silent

    def _write(self, kind: str, value: dict[str, Any]) -> None:
        with self._in_use:
            self._store.set(f"{_KEYS}/{kind}/{self._rank}", json.dumps(value))

    def _read(self, kind: str) -> dict[int, Any]:
        keys = {rank: f"{_KEYS}/{kind}/{rank}" for rank in range(self._size)}
        with self._in_use:
            return {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}

    def _ask(self, question: Callable[[], Any], seconds: float) -> Any:
        """The answer of the store; None if it does not answer. Its requests have no timeout, so a thread makes them."""
        answers: list[Any] = []

        def ask() -> None:
            with suppress(RuntimeError):
                answers.append(question())

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(seconds)
        self._answers = bool(answers)
        return answers[0] if answers else None


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _last_seen(ranks: list[int], alive: dict[int, Any]) -> str:
    places = [alive[rank]["place"] for rank in ranks if rank in alive and alive[rank]["place"]]
    return f"; last seen at {places[0]}" if places else ""
