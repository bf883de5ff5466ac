"""A Slurm of two nodes on this machine, for tests: munged, slurmctld and two slurmd, all on loopback."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
SECONDS = 240.0  # far above what anything here needs, so that it only ends a hang
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=1,sched_interval=1
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def is_installed() -> bool:
    return os.geteuid() == 0 and all(shutil.which(program) or _daemon(program).exists() for program in PROGRAMS)


def _daemon(name: str) -> Path:
    return Path("/usr/sbin") / name


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextmanager
def running(folder: Path) -> Iterator[dict[str, str]]:
    """Start the daemons in a folder, and stop them. Gives the environment for its commands."""
    host = socket.gethostname()
    key, munge = folder / "key", [f"--{name}={folder}/munge.{name[:-5]}" for name in ("pid-file", "log-file")]
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    nodes = [f"NodeName=node{node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=4" for node in (1, 2)]
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(host=host, port=free_port(), folder=folder) + "\n".join(nodes) + "\n")
    for name in ("state", "spool-node1", "spool-node2"):
        (folder / name).mkdir()
    variables = os.environ | {"SLURM_CONF": str(config), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    try:
        for command in (
            ["munged", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket", *munge],
            ["slurmctld", "-c"],
            ["slurmd", "-N", "node1"],
            ["slurmd", "-N", "node2"],
        ):
            subprocess.run([str(_daemon(command[0])), *command[1:]], check=True, env=variables, capture_output=True)
        until(lambda: "idle 2" in output(variables, "sinfo", "--noheader", "--format=%T %D"))
        yield variables
    finally:
        subprocess.run(["scancel", "--user=root"], env=variables, check=False)
        until(lambda: not output(variables, "squeue", "--noheader"))
        for path in folder.glob("*.pid"):
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(path.read_text()), signal.SIGTERM)


def output(variables: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=SECONDS, check=False).stdout


def restart(variables: dict[str, str], job: str) -> None:
    """Let a requeued job start now, not after the two minutes that Slurm lets it wait.

    A node refuses a launch that Slurm makes in the second in which it has ended the last one, and Slurm kills the job
    then. So the next launch is two seconds later.
    """
    until(lambda: state_of(variables, job) == "PENDING", lambda: describe(variables, job))
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now+2"], env=variables, check=True)


def state_of(variables: dict[str, str], job: str) -> str:
    return output(variables, "squeue", "--noheader", "--states=all", "--format=%T", "--jobs", job).strip()


def describe(variables: dict[str, str], job: str) -> str:
    """What Slurm and its logs say of a job that does not do what it should."""
    logs = (path.read_text() for path in sorted(Path(variables["SLURM_CONF"]).parent.glob("*.log")))
    return "\n".join([output(variables, "scontrol", "show", "job", job), *(log[-2000:] for log in logs)])


def until(condition: Callable[[], object], explain: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.1)
