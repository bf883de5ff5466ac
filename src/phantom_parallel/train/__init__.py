"""Training: what to train, the data, the loop, its checkpoints, and the ranks that run it.

`run` is the whole of it, as ``phantom train`` calls it; `train` is the loop alone, on ranks that exist already.
"""

from phantom_parallel.train.config import TrainConfig
from phantom_parallel.train.launch import run
from phantom_parallel.train.loop import Places, Record, Summary, train
from phantom_parallel.train.ranks import Interrupted, LossDiverged, RankDied

__all__ = [
    "Interrupted",
    "LossDiverged",
    "Places",
    "RankDied",
    "Record",
    "Summary",
    "TrainConfig",
    "run",
    "train",
]
