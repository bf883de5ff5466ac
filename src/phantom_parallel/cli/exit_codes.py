"""Exit codes of commands that run on several ranks.

0       finished
1       a rank died, or the loss diverged
2       a mistake in the options or files (`phantom_parallel.cli.main`)
130     stopped by SIGINT or SIGTERM
"""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

from phantom_parallel.distributed.errors import Interrupted, LossDiverged, RankDied

FAILED, STOPPED = 1, 130


@contextmanager
def exit_on_failure() -> Iterator[None]:
    """Exit with one line on stderr and the exit code if the ranks fail or are stopped."""
    try:
        yield
    except Interrupted as error:
        raise _exit(error, STOPPED) from None
    except (RankDied, LossDiverged) as error:
        raise _exit(error, FAILED) from None


def _exit(error: Exception, code: int) -> SystemExit:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]error:[/] {escape(str(error))}")
    return SystemExit(code)
