"""Training: what to train, the data, the loop, its checkpoints, and the ranks that run it.

`run` is the whole of it, as ``phantom train`` calls it; `train` is the loop alone, on ranks that exist already.
"""

from phantom_parallel.train.config import LoopConfig, TrainConfig
from phantom_parallel.train.gpt_config import GPTTrainConfig
from phantom_parallel.train.launch import run
from phantom_parallel.train.loop import Record, Summary, train
from phantom_parallel.train.places import Places
from phantom_parallel.train.ranks import Interrupted, LossDiverged, RankDied

__all__ = [
    "GPTTrainConfig",
    "Interrupted",
    "LoopConfig",
    "LossDiverged",
    "Places",
    "RankDied",
    "Record",
    "Summary",
    "TrainConfig",
    "run",
    "train",
]
