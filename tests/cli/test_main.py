"""The program as a process."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from phantom_parallel.cli.main import main
from tests.cli.commands import refused


def test_a_reader_that_leaves_early_is_no_error():
    """As with `phantom --help | head -1`."""
    command = [sys.executable, "-m", "phantom_parallel.cli.main", "--help"]
    writing = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    writing.stdout.close()
    assert writing.stderr.read() == b""
    assert writing.wait(60) == 141


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "did you mean 'train'? There are compare, study,"),
        (["machine", "shwo"], "did you mean 'show'?"),
        (["train", "gtp", "--out", "x"], "did you mean 'gpt'? There are ffn, gpt"),
        (["doctor", "--only", "exchange"], "exchanges"),
        (["study", "goasts"], "did you mean 'ghosts'? There are batch, decode, epochs, ghosts,"),
    ],
)
def test_a_mistyped_name_is_an_error_with_the_nearest_one(capsys, arguments, message):
    assert message in refused(capsys, *arguments)


def test_help_is_also_a_command(capsys):
    assert main(["help"]) == 0
    assert "phantom COMMAND --help" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["help", "machine", "show"])
    assert caught.value.code == 0
    assert "usage: phantom machine show" in capsys.readouterr().out


def test_long_help_is_grouped_with_emulated_hosts_last(capsys):
    with pytest.raises(SystemExit):
        main(["train", "gpt", "--help"])
    titles = re.findall(r"^\W*([\w-]+) options\W*$", capsys.readouterr().out, re.MULTILINE)
    assert titles == ["model", "data", "ranks", "optimizer", "checkpoints", "output", "emulated-hosts"]
