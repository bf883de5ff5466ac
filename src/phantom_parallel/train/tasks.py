"""Which task a config is of."""

from typing import Any

from phantom_parallel.train.config import LoopConfig
from phantom_parallel.train.ffn import FFNTask
from phantom_parallel.train.gpt import GPTTask
from phantom_parallel.train.task import Task

TASKS: dict[str, type[Any]] = {"ffn": FFNTask, "gpt": GPTTask}


def task_of(config: LoopConfig) -> type[Task[Any]]:
    """The kind of task; calling it with the config and places makes one."""
    return TASKS[config.task]
