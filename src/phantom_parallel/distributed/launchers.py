"""Ranks that another launcher has started, such as ``torchrun``, ``srun`` or ``mpirun``: what the environment says.

The variables of every launcher are translated to torch's (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT), and the job and step that ranks belong to are in `JOB`. Imports nothing heavy, so that a command line can
use it before torch is loaded.
"""

import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

JOB = "PHANTOM_JOB"
_PORTS = range(10_000, 30_000)  # below those that systems assign to outgoing connections


class _Launcher(NamedTuple):
    """The variables by which a launcher, recognized by ``rank``, describes a rank. Of several, the first that is set
    counts; those of ``job`` together identify the job and step.
    """

    rank: str
    size: str
    local_rank: str
    local_size: str
    job: str


# Launchers that are started by others come first: mpirun starts its daemons with srun.
_TABLE = """
torchrun RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE PHANTOM_JOB
OpenMPI OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE PMIX_NAMESPACE
JSM JSM_NAMESPACE_RANK JSM_NAMESPACE_SIZE JSM_NAMESPACE_LOCAL_RANK JSM_NAMESPACE_LOCAL_SIZE LSB_JOBID|JSM_NAMESPACE_ID
PALS PALS_RANKID PALS_SIZE|PMI_SIZE PALS_LOCAL_RANKID|PMI_LOCAL_RANK PALS_LOCAL_SIZE|PMI_LOCAL_SIZE PALS_APID
Flux FLUX_TASK_RANK FLUX_JOB_SIZE FLUX_TASK_LOCAL_ID - FLUX_JOB_ID
Slurm SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE SLURM_JOB_ID|SLURM_STEP_ID
PMI PMI_RANK PMI_SIZE MPI_LOCALRANKID|PMI_LOCAL_RANK MPI_LOCALNRANKS|PMI_LOCAL_SIZE PMI_JOBID
"""
_LAUNCHERS = {
    name: _Launcher(*(variables.replace("|", " ") for variables in row))
    for name, *row in map(str.split, _TABLE.strip().splitlines())
}


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Translate the variables of a launcher to torch's, and `JOB`: none in a process that no launcher has started, or
    as the only one; MASTER_ADDR is empty where the host of rank 0 is not known. A ValueError names a variable that is
    missing or is not a number.
    """
    name = next((name for name in _LAUNCHERS if _is_task_of(name, environment)), None)
    if name is None:
        return {}
    launcher = _LAUNCHERS[name]
    rank = _number(environment, launcher.rank, least=0)
    size = _number(environment, launcher.size, least=1)
    if size == 1 and name != "torchrun":
        return {}
    if rank >= size:
        raise ValueError(f"{launcher.rank}={rank} must be below the number of ranks, {size}")
    hosts = _number(environment, "FLUX_JOB_NNODES", default=1, least=1)
    local_size = _number(environment, launcher.local_size, default=-(-size // hosts), least=1)
    local_rank = _number(environment, launcher.local_rank, default=rank % local_size, least=0)
    job = ".".join(environment.get(variable, "") for variable in launcher.job.split())
    port = _PORTS[zlib.crc32(job.encode()) % len(_PORTS)] if job.strip(".") else 29_500
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or _master(environment, size, local_size),
        "MASTER_PORT": str(_number(environment, "MASTER_PORT", default=port, least=1)),
        JOB: job,
    }


def launched_externally() -> bool:
    """Whether this process is one rank of several that another launcher has started."""
    return bool(rank_variables(os.environ))


def external_ranks() -> int:
    """Number of ranks that another launcher has started; 1 in a process that is not part of a launch."""
    return int(rank_variables(os.environ).get("WORLD_SIZE", "1"))


def external_hosts() -> int:
    """Number of hosts on which another launcher has started ranks; 1 in a process that is not part of a launch."""
    return external_ranks() // int(rank_variables(os.environ).get("LOCAL_WORLD_SIZE", "1"))


def global_rank() -> int:
    """Rank of this process in its launch; 0 in a process that is not part of one."""
    return int(_variables().get("RANK", "0"))


def is_rank_zero() -> bool:
    """Whether this process is rank 0; True in a process that is not part of a launch."""
    return global_rank() == 0


def is_local_rank_zero() -> bool:
    """Whether this process is the first rank of its host; True in a process that is not part of a launch."""
    return _variables().get("LOCAL_RANK", "0") == "0"


def is_on_first_host() -> bool:
    """Whether rank 0 is on the host of this process; True in a process that is not part of a launch."""
    return global_rank() < int(_variables().get("LOCAL_WORLD_SIZE", "1"))


def reports_error() -> bool:
    """Whether this process prints an error that ends it, so that ranks which fail together print it once on each host:
    the first rank of the host, or under ``torchrun``, which ends the others as soon as one has left, the first to ask.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return is_local_rank_zero()
    try:  # in torchrun's folder of all ranks
        os.close(os.open(Path(file).parents[1] / "reported", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:
        return is_local_rank_zero()
    return True


def first_host(hosts: str) -> str:
    """First name of a list in Slurm's notation: ``gpu[007-009,12],login`` starts with gpu007."""
    match = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,\[]*))?", hosts)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST={hosts!r} names no host: set MASTER_ADDR to the first one")
    return "".join(part or "" for part in match.groups())


def _is_task_of(name: str, environment: Mapping[str, str]) -> bool:
    if name == "Slurm":  # batch scripts are no tasks of a step, nor are ranks of an mpiexec that srun has started
        tasks = environment.get("SLURM_STEP_NUM_TASKS")
        if tasks is None or environment.get("PMI_SIZE", tasks) != tasks:
            return False
    return _LAUNCHERS[name].rank in environment


def _variables() -> dict[str, str]:
    """Those of `rank_variables`, and none where they are incomplete: then the error is to be printed."""
    try:
        return rank_variables(os.environ)
    except ValueError:
        return {}


def _number(environment: Mapping[str, str], names: str, *, least: int, default: int | None = None) -> int:
    """The number of the first of these variables that is set."""
    name = next((name for name in names.split() if name in environment), names.partition(" ")[0])
    text = environment.get(name)
    if text is None and default is not None:
        return default
    match = re.match(r"\d+" if name == "SLURM_STEP_TASKS_PER_NODE" else r"\d+$", text or "")  # such as 4(x2)
    if match is None or int(match.group()) < least:
        given = "is not set" if text is None else f"is {text!r}"
        raise ValueError(f"{name} {given}, and must be a whole number of at least {least}: a launcher sets it")
    return int(match.group())


def _master(environment: Mapping[str, str], size: int, local_size: int) -> str:
    """The host of rank 0; empty if it is not known."""
    if size == local_size:
        return "localhost"
    if hosts := environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST")):
        return first_host(hosts)
    nodes = Path(environment.get("PBS_NODEFILE", ""))
    return nodes.read_text().split()[0] if nodes.is_file() else ""
