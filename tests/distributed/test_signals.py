"""Signals as a request to stop."""

import os
import signal

import pytest

from phantom_parallel.distributed.signals import StopRequest


@pytest.fixture
def _hangs_up():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_hangs_up")
@pytest.mark.parametrize(
    ("numbers", "insistent"),
    [
        ([signal.SIGINT], False),
        ([signal.SIGINT, signal.SIGINT], True),
        ([signal.SIGHUP], False),
        ([signal.SIGHUP, signal.SIGHUP], False),  # of the terminal and of its shell
        ([signal.SIGHUP, signal.SIGTERM], True),
    ],
)
def test_signals_are_recorded_and_a_second_one_insists(numbers, insistent):
    with StopRequest() as stop:
        assert not stop.requested
        for number in numbers:
            os.kill(os.getpid(), number)
        assert (stop.received, stop.requested, stop.insistent) == (numbers, True, insistent)


@pytest.mark.usefixtures("_hangs_up")
def test_a_terminal_that_closes_is_ignored_under_nohup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.requested
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
