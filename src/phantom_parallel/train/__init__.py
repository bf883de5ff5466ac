"""Training: the settings of a training, the loop, the optimizer, checkpoints and the run folder.

`run` is the whole of it, as ``phantom train`` calls it; `train` is the loop alone, on ranks that exist already.
"""

from phantom_parallel.train.config import TrainConfig
from phantom_parallel.train.loop import Record, Summary, train
from phantom_parallel.train.run import run

__all__ = ["Record", "Summary", "TrainConfig", "run", "train"]
