"""Ranks that were launched externally, by ``torchrun`` or ``srun``: what the environment says about this process.

``torchrun`` sets RANK, WORLD_SIZE and the like; Slurm's own variables for a step of several tasks are translated to
them. Imports nothing heavy, so that a command line can use it before torch is loaded.
"""

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path


def launched_externally() -> bool:
    """Whether this process is one rank of several that another launcher has started."""
    return "RANK" in os.environ or bool(slurm_ranks(os.environ))


def is_rank_zero() -> bool:
    """Whether this process is rank 0; True in a process that is not part of a launch."""
    return global_rank() == 0


def global_rank() -> int:
    """Rank of this process in its launch; 0 in a process that is not part of one."""
    return int((os.environ | slurm_ranks(os.environ)).get("RANK", "0"))


def is_local_rank_zero() -> bool:
    """Whether this process is the first rank of its host; True in a process that is not part of a launch."""
    return (os.environ | slurm_ranks(os.environ)).get("LOCAL_RANK", "0") == "0"


def reports_error(lost: Collection[int] = ()) -> bool:
    """Whether this process prints an error that ends it, so that ranks which fail together print it once on each host.

    Under ``torchrun`` that is the first one to call this: as soon as one rank has left, torchrun ends the others, which
    then may not have printed theirs. Elsewhere it is the first rank of the host that is not ``lost``.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return _is_first_on_host(lost)
    try:
        os.close(
            os.open(Path(file).parents[1] / "reported", os.O_CREAT | os.O_EXCL)
        )  # in torchrun's folder of all ranks
    except FileExistsError:
        return False
    except OSError:
        return _is_first_on_host(lost)
    return True


def _is_first_on_host(lost: Collection[int]) -> bool:
    environment = os.environ | slurm_ranks(os.environ)
    local = int(environment.get("LOCAL_RANK", "0"))
    first = global_rank() - local  # ranks of a host are neighbours
    return all(rank in lost for rank in range(first, first + local))


def is_on_first_host() -> bool:
    """Whether rank 0 is on the host of this process; True in a process that is not part of a launch."""
    environment = os.environ | slurm_ranks(os.environ)
    return global_rank() < int(environment.get("LOCAL_WORLD_SIZE", "1"))


def slurm_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Translate Slurm's variables for a step of several tasks to RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT.

    Returns:
        The variables; empty outside of ``srun``, inside ``torchrun``, and for a step of one task.
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" in environment or "SLURM_PROCID" not in environment or tasks == "1":
        return {}
    hosts = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", "localhost"))
    per_node = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", tasks))
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": per_node.group() if per_node else tasks,
        "MASTER_ADDR": environment.get("MASTER_ADDR", first_host(hosts)),
        "MASTER_PORT": environment.get("MASTER_PORT", str(20000 + int(environment.get("SLURM_JOB_ID", "0")) % 20000)),
    }


def first_host(hosts: str) -> str:
    """First name of a list in Slurm's notation: ``gpu[007-009,12],login`` starts with gpu007."""
    found = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,\[]*))?", hosts)
    if found is None:
        raise ValueError(f"SLURM_STEP_NODELIST={hosts!r} names no host: set MASTER_ADDR to the first one")
    return "".join(part or "" for part in found.groups())
