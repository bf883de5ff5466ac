"""The program as a process."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("command", [["--help"], ["plan", "--help"]])
def test_a_reader_that_leaves_early_is_no_error(command):
    """As with `phantom plan --help | head -1`."""
    writing = subprocess.Popen(
        [sys.executable, "-m", "phantom_parallel.cli.main", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    writing.stdout.close()
    assert writing.stderr.read() == b""
    assert writing.wait(60) == 141
