"""``phantom doctor``: its checks notice what they are for, and a check that dies or hangs is a line like any other."""

import json
import sys

import pytest
import torch

from phantom_parallel.cli import doctor
from phantom_parallel.cli.doctor import CHECKS, Options
from phantom_parallel.cli.main import main
from phantom_parallel.ops import collectives


def test_a_check_that_dies_or_hangs_is_a_failed_line_and_the_others_run(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(doctor, "SECONDS", 3.0)
    passes = "import json, sys; json.dump({'checks': [{'status': 'ok', 'figure': '7 us'}]}, open(sys.argv[-1], 'w'))"
    dies = "import os; print('last words', flush=True); os.abort()"
    scripts = {"dies": dies, "hangs": "while True: pass", "passes": passes}  # in place of the commands of checks
    monkeypatch.setattr(doctor, "CHECKS", dict.fromkeys(scripts, ""))
    monkeypatch.setattr(
        Options, "_command", lambda self, name, ranks: [sys.executable, "-c", scripts[name], "doctor", "--only", name]
    )
    file = tmp_path / "doctor.json"
    with pytest.raises(SystemExit) as leaving:
        Options(ranks=2, json=file).run()
    assert leaving.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines if not line.startswith(" ")][:3] == [
        ["FAILED", "dies"],
        ["FAILED", "hangs"],
        ["ok", "passes"],
    ]
    assert lines[-1] == "2 of 3 checks failed, 0 skipped"
    dies, hangs, passed = json.loads(file.read_text())["checks"]
    assert "exit code -6" in dies["figure"]
    assert "last words" in dies["output"]
    assert "not done after 3 s" in hangs["figure"]
    assert passed["figure"] == "7 us"


def wrong_exchanges(rank_to_spoil):
    groups = doctor._groups(torch.device("cpu"))
    right = doctor._inexact(groups["all"], torch.bfloat16, torch.device("cpu"))
    gather = collectives.all_gather

    def spoiled(x, group, exact=None):
        arrived = gather(x, group, exact)
        if group.rank == rank_to_spoil:
            arrived.values[0, 0, 0] += 1
        return arrived

    collectives.all_gather = spoiled
    try:
        return right, doctor._inexact(groups["all"], torch.bfloat16, torch.device("cpu"))
    finally:
        collectives.all_gather = gather


def test_one_wrong_value_of_an_exchange_is_counted(ranks):
    for rank, (right, wrong) in enumerate(ranks(2)(wrong_exchanges, 1)):
        assert right == {"all-gather": 0, "reduce-scatter": 0, "all-to-all": 0}
        assert wrong == {"all-gather": rank, "reduce-scatter": 0, "all-to-all": 0}


@pytest.mark.slow
def test_every_check_passes_here(capfd, tmp_path):
    file = tmp_path / "doctor.json"
    assert main(["doctor", "--ranks", "2", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert {check["name"]: check["status"] for check in report["checks"]} == {
        name: "skipped" if name == "blocking" else "ok" for name in CHECKS
    }
    assert report["facts"]["backend"] == "gloo"
    assert "0 of 10 checks failed, 1 skipped" in capfd.readouterr().out
