import json

import pytest

from phantom_parallel.cli.main import main


def test_the_table_says_that_formulas_agree(capsys):
    assert main(["dryrun", "--width", "1024", "--depth", "2", "--ranks", "8", "--ghosts", "4", "--batch", "16"]) == 0
    text = capsys.readouterr().out
    assert "rank 0 of 8" in text
    assert "Formulas and code agree in every term" in text


def test_json_has_the_counts(capsys):
    assert (
        main(
            ["dryrun", "--strategy", "tensor", "--width", "64", "--depth", "1", "--ranks", "4", "--rank", "3", "--json"]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["formulas_agree"]
    assert found["flops"] == {"forward": 2 * 64 * 64 * 16, "backward": 2 * 64 * 64 * 16}
    assert found["sent_bytes"]["forward"] == 3 * 64 * 16 * 4
    assert found["all_ranks"]["flops"] == 4 * 2 * 2 * 64 * 64 * 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--blocks", "7"], "blocks=7 does not divide in_features=16384"),
        (["--ranks", "3"], "blocks=3 does not divide"),
        (["--strategy", "dense"], "dense runs on one rank"),
        (["--strategy", "tensor", "--ghosts", "4"], "belong to the strategy phantom"),
        (["--rank", "99"], "rank must be from 0 to 15, got 99"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, arguments, message):
    assert main(["dryrun", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in " ".join(error.split())
    assert "Traceback" not in error


def test_unknown_commands_and_options(capsys):
    assert main(["fly"]) == 2
    assert "there is no command 'fly'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["dryrun", "--wings", "2"])
    assert caught.value.code == 2
    assert main([]) == 0
    assert "dryrun" in capsys.readouterr().out
