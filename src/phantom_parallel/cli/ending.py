"""How work on ranks may end, and the exit codes: 1 where a rank died or the loss diverged, 130 where it was stopped."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

from phantom_parallel.distributed.errors import Interrupted, LossDiverged, RankDied


@contextmanager
def ending() -> Iterator[None]:
    """Turns these into a line and an exit code."""
    try:
        yield
    except Interrupted as error:
        raise _left(str(error), 130) from None
    except (RankDied, LossDiverged) as error:
        raise _left(str(error), 1) from None


def _left(message: str, code: int) -> SystemExit:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]error:[/] {escape(message)}")
    return SystemExit(code)
