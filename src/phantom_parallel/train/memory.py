"""Whether local ranks will fit into memory, asked before they start: later the system ends one of them, or another's
program.
"""

from phantom_parallel.train.config import TrainConfig
from phantom_parallel.train.optimizer import state_keys
from phantom_parallel.utils import resources

_WORD = 4


def least_bytes(config: TrainConfig) -> int:
    """What all ranks together need at the least: weights, gradients, optimizer states, data, and the copies of weights
    and states that a checkpoint is written from.
    """
    task = config.task()
    parameters = sum(parameter.numel() for parameter in task.outline(config).parameters())
    states = sum(key != "step" for key in state_keys(config))
    words = parameters * (2 + states + 1 + states)
    held = config.replicas * words * _WORD + config.dp * task.data_bytes(config)
    return config.ranks * config.dp * resources.PROCESS_BYTES + held


def check_memory(config: TrainConfig) -> None:
    """An error where the ranks cannot fit into this machine's memory."""
    needed, free = least_bytes(config), resources.available_bytes()
    if free is not None and needed > free:
        raise ValueError(
            f"ranks={config.ranks} times dp={config.dp} need at least {needed / 2**30:.1f} GiB of memory, "
            f"{free / 2**30:.1f} GiB are free: use fewer ranks or copies, a smaller model, or fewer samples"
        )
