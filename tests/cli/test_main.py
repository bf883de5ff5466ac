"""The program as a process."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("command", [["--help"], ["plan", "--help"], ["meter"]])
def test_a_reader_that_leaves_early_is_no_error(command):
    """As with `phantom plan --help | head -1`."""
    writing = subprocess.Popen(
        [sys.executable, "-m", "phantom_parallel.cli.main", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    writing.stdout.close()
    assert writing.stderr.read() == b""
    assert writing.wait(60) == 141


@pytest.mark.parametrize(
    ("command", "code"),
    [("--version >&-", 0), ("--version <&- >&- 2>&-", 0), ("nothing 2>&-", 2), ("nothing 2>&- >&-", 2)],
)
def test_streams_may_be_closed(command, code):
    ended = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m phantom_parallel.cli.main {command}"], capture_output=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, b"", b"")


def test_files_do_not_get_the_descriptors_of_closed_streams(tmp_path):
    program = "import os; from phantom_parallel.utils.streams import open_missing_streams as o; o(); "
    program += f"assert os.open({str(tmp_path / 'new')!r}, os.O_CREAT) > 2; os.system('echo to nowhere || kill $PPID')"
    ended = subprocess.run(["sh", "-c", f'exec {sys.executable} -c "{program}" <&- >&-'], capture_output=True)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a full device")
def test_output_to_a_full_disk_is_one_line():
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "phantom_parallel.cli.main", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (ended.returncode, ended.stderr) == (2, "error: [Errno 28] No space left on device\n")
