"""Commands as ranks of Slurm's, Open MPI's and torchrun's: real launchers on this machine."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phantom_parallel.cli.main import main
from tests.cli.test_compare import SMALL
from tests.distributed import slurm

pytestmark = pytest.mark.slow
needs_slurm = pytest.mark.skipif(not slurm.is_installed(), reason="needs slurm-wlm and munge, and root")
ROOT = Path(__file__).resolve().parent.parent.parent
PHANTOM = (sys.executable, "-m", "phantom_parallel.cli.main")
TRAIN = ("train", "--width", "32", "--depth", "2", "--blocks", "4", "--ghosts", "4", "--batch", "16")
SHORT = ("--log-every", "3", "--eval-every", "3", "--checkpoint-every", "3")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm.running(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


def run(variables, *command, code=0):
    words = [str(word) for word in command]
    ended = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=slurm.SECONDS, check=False)
    assert ended.returncode == code, ended.stderr[-3000:]
    return ended


def loss(folder):
    return json.loads((folder / "summary.json").read_text())["eval_loss"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The held-out loss after six steps in one process."""
    out = tmp_path_factory.mktemp("alone") / "out"
    main([*TRAIN, *SHORT, "--steps", "6", "--out", str(out)])
    return pytest.approx(loss(out), rel=1e-5)


@needs_slurm
def test_a_training_by_srun_is_resumed_on_other_tasks(cluster, tmp_path, expected):
    out = tmp_path / "out"
    first = run(cluster, "srun", "-N2", "-n2", *PHANTOM, *TRAIN, *SHORT, "--steps", 3, "--out", out)
    assert "2 ranks on 2 hosts" in first.stderr
    run(cluster, "srun", "-N2", "-n4", *PHANTOM, "train", "--dp", 2, "--steps", 6, "--resume", "--out", out)
    assert loss(out) == expected


@needs_slurm
def test_two_steps_of_a_job_run_at_once(cluster, tmp_path, expected):
    step = f"srun --exclusive -n2 {' '.join((*PHANTOM, *TRAIN, *SHORT))} --steps 6 --out {tmp_path}"
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n{step}/a & first=$!\n{step}/b & wait $! && wait $first\n")
    run(cluster, "sbatch", "--wait", "-N1", "-n4", f"--output={tmp_path}/log", script)
    assert [loss(tmp_path / name) for name in "ab"] == [expected, expected]


@needs_slurm
def test_a_wrong_option_is_one_line_on_each_node(cluster, tmp_path):
    refused = run(cluster, "srun", "-N2", "-n4", *PHANTOM, "train", "--width", 63, "--out", tmp_path / "out", code=2)
    assert len(re.findall(r"^error(?: on rank \d)?: ", refused.stderr, re.MULTILINE)) == 2
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "out").exists()


@needs_slurm
def test_the_example_requeues_itself_when_its_time_ends(cluster, tmp_path):
    preset = tmp_path / "small.toml"
    preset.write_text(SMALL.replace("target_loss = 0.6", "target_loss = 1e-9").replace("steps = 40", "steps = 300"))
    script = (ROOT / "examples" / "compare.slurm").read_text()
    script = re.sub(r"#SBATCH --(?!requeue|open-mode|signal).*\n", "", script).replace("source .venv/bin/activate", "")
    script = script.replace(" phantom compare --preset paper", f" {' '.join(PHANTOM)} compare --preset {preset}")
    (tmp_path / "job.sh").write_text(script)
    submit = ("sbatch", "--parsable", "-N1", "-n2", "--time=60", f"--chdir={tmp_path}", f"--output={tmp_path}/log")
    job = run(cluster, *submit, tmp_path / "job.sh").stdout.strip()
    out = tmp_path / "out" / f"compare-paper-{job}"
    slurm.until(lambda: list((out / "cells").glob("*.json")))
    run(cluster, "scancel", "--signal=TERM", job)  # as Slurm does before the end of the time
    slurm.until(lambda: "PENDING" in slurm.output(cluster, "squeue", "--noheader", "--format=%T", "--jobs", job))
    kept = {path: path.stat().st_mtime_ns for path in (out / "cells").glob("*.json")}
    assert kept
    assert not (out / "results.json").exists()
    run(cluster, "scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm lets requeued jobs wait
    slurm.until((out / "report.html").exists)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept  # what was finished is not run again
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI")
def test_a_training_by_mpirun(tmp_path, expected):
    mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", "--mca", "btl_tcp_if_include", "lo")
    started = run(os.environ, *mpirun, *PHANTOM, *TRAIN, *SHORT, "--steps", 6, "--out", tmp_path / "out")
    assert "2 ranks on 1 host" in started.stderr
    assert loss(tmp_path / "out") == expected


def test_a_training_by_torchrun_on_two_nodes(tmp_path, expected):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1")
    torchrun = (*torchrun, "--master-addr", "127.0.0.1", "--master-port", str(slurm.free_port()))
    words = ("-m", PHANTOM[-1], *TRAIN, *SHORT, "--steps", "6", "--out", str(tmp_path / "out"))
    other = subprocess.Popen([*torchrun, "--node-rank", "1", *words], stderr=subprocess.DEVNULL)
    first = run(os.environ, *torchrun, "--node-rank", "0", *words)
    assert other.wait(slurm.SECONDS) == 0
    assert "2 ranks on 2 hosts" in first.stderr
    assert loss(tmp_path / "out") == expected
