"""Whether local ranks will fit into memory, asked before they start: later the system ends one of them, or another's
program.
"""

from pathlib import Path

from phantom_parallel.families.registry import get_family
from phantom_parallel.train.config import TrainConfig
from phantom_parallel.train.optimizer import state_keys

_PROCESS = 100 << 20  # bytes that a process with torch has for itself, at least
_WORD = 4


def least_bytes(config: TrainConfig) -> int:
    """What all ranks together need at the least: weights, gradients, optimizer states, data, and the copies of weights
    and states that a checkpoint is written from.
    """
    task = get_family(config.family).task()
    parameters = sum(parameter.numel() for parameter in task.outline(config).parameters())
    states = sum(key != "step" for key in state_keys(config))
    words = parameters * (2 + states + 1 + states)
    held = config.replicas * words * _WORD + config.dp * task.data_bytes(config)
    return config.ranks * config.dp * _PROCESS + held


def available_bytes() -> int | None:
    """What Linux would give to new processes; unknown elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


def check_memory(config: TrainConfig) -> None:
    """An error where the ranks cannot fit into this machine's memory."""
    needed, free = least_bytes(config), available_bytes()
    if free is not None and needed > free:
        raise ValueError(
            f"ranks={config.ranks} times dp={config.dp} need at least {needed / 2**30:.1f} GiB of memory, "
            f"{free / 2**30:.1f} GiB are free: use fewer ranks or copies, a smaller model, or fewer samples"
        )
