"""Commands as ranks of Slurm's, Open MPI's and torchrun's: real launchers on this machine."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phantom_parallel.cli.doctor import CHECKS
from phantom_parallel.cli.main import main
from phantom_parallel.cost.hardware import load_profile
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
    slurm.restart(cluster, job)
    kept = {path: path.stat().st_mtime_ns for path in (out / "cells").glob("*.json")}
    assert kept
    assert not (out / "results.json").exists()
    slurm.until((out / "report.html").exists, lambda: slurm.describe(cluster, job) + (tmp_path / "log").read_text())
    assert {path: path.stat().st_mtime_ns for path in kept} == kept  # what was finished is not run again
    assert "Traceback" not in (tmp_path / "log").read_text()


def on_two_nodes(ranks, *words, variables=os.environ):
    """Run a script, or a module after -m, by torchrun with so many ranks on each of two nodes."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(ranks))
    torchrun = (*torchrun, "--master-addr", "127.0.0.1", "--master-port", str(slurm.free_port()))
    command = [*torchrun, "--node-rank", "1", *map(str, words)]
    other = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    first = run(variables, *torchrun, "--node-rank", "0", *words)
    assert other.communicate(timeout=slurm.SECONDS)[0] == ""  # rank 0 alone prints
    assert other.returncode == 0
    return first


def by(launcher, request, ranks, *words, variables=os.environ):
    """Run a script, or a module after -m, on as many ranks on each of two nodes; of mpirun, on one."""
    if launcher == "torchrun":
        return on_two_nodes(ranks, *words, variables=variables)
    if launcher == "srun":
        variables = variables | {
            name: request.getfixturevalue("cluster")[name] for name in ("SLURM_CONF", "MASTER_ADDR")
        }
        return run(variables, "srun", "-N2", f"--ntasks-per-node={ranks}", sys.executable, *words)
    return run(variables, *MPIRUN, "-n", 2 * ranks, sys.executable, *words)


MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "btl_tcp_if_include", "lo")
needs_mpi = pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI")
LAUNCHERS = ["torchrun", pytest.param("srun", marks=needs_slurm)]


@pytest.mark.parametrize(
    ("launcher", "hosts"), [("torchrun", "2 hosts"), pytest.param("mpirun", "1 host", marks=needs_mpi)]
)
def test_a_training_by_a_launcher(launcher, hosts, tmp_path, expected, request):
    words = (*PHANTOM[1:], *TRAIN, *SHORT, "--steps", 6, "--out", tmp_path / "out")
    assert f"2 ranks on {hosts}" in by(launcher, request, 1, *words).stderr
    assert loss(tmp_path / "out") == expected


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_doctor_checks_the_ranks_of_a_launcher(launcher, request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    done = by(launcher, request, 1, *PHANTOM[1:], "doctor", "--json", tmp_path / "file.json", variables=variables)
    report = json.loads((tmp_path / "file.json").read_text())
    skipped = ("blocking", "stopped")  # these start ranks
    assert {check["name"]: check["status"] for check in report["checks"]} == {
        name: "skipped" if name in skipped else "ok" for name in CHECKS
    }
    assert report["facts"]["hosts"] == 2
    assert "0 of 10 checks failed, 2 skipped" in done.stdout
    assert report["checks"][0]["repeat"].endswith("by the same launcher")
    assert not list(tmp_path.glob("phantom-doctor-*"))


# The smallest of the models that are timed.
SMALLEST = """
import sys
from phantom_parallel.cli.doctor import CHECKS
from phantom_parallel.cli.main import main
from phantom_parallel.cost.hardware import load_profile
from phantom_parallel.families.registry import get_family

family = get_family("ffn")
shapes = family.step_shapes
vars(family)["step_shapes"] = lambda ranks, held_out: shapes(ranks, held_out=held_out)[-1 if held_out else 0 :][:1]
sys.exit(main())
"""


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_cluster_is_measured_for_the_planner(launcher, request, tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(SMALLEST)
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PHANTOM_PROFILES": str(tmp_path)}
    words = (script, "machine", "measure", "--seconds", "0.001", "--json")
    (name,) = json.loads(by(launcher, request, 2, *words, variables=variables).stdout)
    assert name == "this-machine-4-nodes-2"
    profile = load_profile(tmp_path / f"{name}.toml")
    assert profile.devices_per_node.value == 2
    assert profile.inside != profile.between
    words = (script, "machine", "check", "--turns", "1", "--json")
    (outcome,) = json.loads(by(launcher, request, 2, *words, variables=variables).stdout)["outcomes"]
    assert outcome["setting"]["ranks"] == 4
    assert outcome["predicted"]["phantom"] > 0
    plan = ("plan", "--width", "256", "--depth", "2", "--batch", "64", "--devices", "4", "--hardware")
    assert main([*plan, str(tmp_path / f"{name}.toml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
