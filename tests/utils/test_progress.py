"""Progress on stderr: lines without a terminal, a bar on one, and nothing if it is not to be shown."""

import pytest

from phantom_parallel.utils import progress
from phantom_parallel.utils.progress import ProgressDisplay


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The time in seconds, which tests set."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def lines(capsys) -> list[str]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_without_a_terminal_there_is_a_line_every_few_seconds_and_at_the_end(clock, capsys):
    with ProgressDisplay() as display:
        display.stage("measuring: turn", 10)
        for turn in range(1, 11):
            clock[0] += 2.0
            display.update(turn)
    assert lines(capsys) == [
        "measuring: turn 3/10 0:00:14 left",
        "measuring: turn 6/10 0:00:08 left",
        "measuring: turn 9/10 0:00:02 left",
        "measuring: turn 10/10",
    ]


def test_on_a_terminal_there_is_a_bar(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    with ProgressDisplay() as display:
        display.stage("step", 4)
        display.update(3, "loss 0.5")
        display.print("above")
    text = "\n".join(lines(capsys))
    for part in ("step", "loss 0.5", "━", "above", "left"):
        assert part in text


@pytest.mark.parametrize("terminal", [False, True])
def test_the_work_goes_on_if_progress_cannot_be_written(terminal, monkeypatch):
    class Gone:
        encoding, tried = "utf-8", 0

        def write(self, text: str) -> int:
            Gone.tried += 1
            raise BrokenPipeError

        def flush(self) -> None:
            raise BrokenPipeError

        def isatty(self) -> bool:
            return terminal

    monkeypatch.setattr("sys.stderr", Gone())
    with ProgressDisplay() as display:
        display.stage("step", 2)
        display.update(1, line=True)
        display.print("a line")
        display.update(2)
    assert Gone.tried
