"""Slurm's variables for ranks, translated to torch's."""

import subprocess
import sys

import pytest

from phantom_parallel.distributed.external import first_host, is_on_first_host, reports_error, slurm_ranks

# As srun sets them for the sixth task of --nodes 2 --ntasks 8.
STEP = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "frontier[00017-00018]",
}


def test_a_task_of_a_step_is_a_rank():
    assert slurm_ranks(STEP) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "frontier00017",
        "MASTER_PORT": str(20000 + 1234567 % 20000),
    }


def test_a_users_own_address_stays():
    found = slurm_ranks(STEP | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "29500")


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},  # a batch script, before srun
        STEP | {"RANK": "0", "WORLD_SIZE": "2"},  # torchrun within a step
        STEP | {"SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_elsewhere_there_are_no_ranks_of_slurms(environment):
    assert slurm_ranks(environment) == {}


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu7", "gpu7"),
        ("a,b", "a"),
        ("gpu[007-009,12],login", "gpu007"),
        ("nid[001,003]", "nid001"),
        ("rack[2-3]-ib0", "rack2-ib0"),
        ("a1,b[2-3]", "a1"),
    ],
)
def test_the_first_host_of_a_list(hosts, first):
    assert first_host(hosts) == first


def test_under_torchrun_the_first_rank_that_fails_reports_it(tmp_path, monkeypatch):
    for rank in ("1", "0"):
        (tmp_path / rank).mkdir()
    monkeypatch.setenv("RANK", "1")
    reported = []
    for rank in ("1", "0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / rank / "error.json"))
        reported.append(reports_error())
    assert reported == [True, False, False]


@pytest.mark.parametrize(("rank", "reports"), [("0", True), ("1", False)])
def test_elsewhere_the_first_rank_of_a_host_reports(tmp_path, monkeypatch, rank, reports):
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert reports_error() == reports
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "0" / "error.json"))
    assert reports_error() == reports


@pytest.mark.parametrize(("rank", "first"), [("0", True), ("3", True), ("4", False)])
def test_the_first_host_has_the_first_ranks(monkeypatch, rank, first):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert is_on_first_host() == first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "line"),
    [(["--ranks", "2", "--width", "63"], "error: blocks=4 does not divide"), (["--nonsense"], "Unrecognized options:")],
)
def test_a_mistake_under_torchrun_is_printed_once(tmp_path, options, line):
    command = ["-m", "phantom_parallel.cli.main", "train", "--out", str(tmp_path / "out"), *options]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = subprocess.run([*torchrun, *command], capture_output=True, text=True, timeout=120)
    assert found.stderr.count(line) == 1
    assert found.stderr.count("Traceback") == 1  # torchrun's own
    assert "exitcode  : 2" in found.stderr
    assert found.stdout == ""
