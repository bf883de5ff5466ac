"""Data that a teacher network makes: the same numbers whatever ranks share the work.

Teachers are evaluated in float64 and rounded once, since a product in float32 would depend on the number of threads.
Rows come in chunks, each with random numbers of its own; ranks evaluate different chunks and exchange features.
"""

from collections import OrderedDict
from collections.abc import Hashable

import torch
import torch.distributed as dist
from torch import Tensor

from phantom_parallel.distributed.context import ParallelContext
from phantom_parallel.families.ffn.model import FFN, FFNConfig
from phantom_parallel.families.ffn.train_config import FFNTrainConfig
from phantom_parallel.utils.seeds import generator, mixed

_CHUNK = 256  # rows that a teacher sees at once
_KEPT = 2  # data sets that stay in the process: comparisons train several models on the same ones, one after another

_cache: OrderedDict[Hashable, tuple[Tensor, Tensor]] = OrderedDict()


def teach(config: FFNTrainConfig, features: slice, parallel: ParallelContext) -> tuple[Tensor, Tensor]:
    """Inputs and targets of all rows, with these features. All ranks of ``parallel`` call this and share the work."""
    kind = (config.data, config.teacher_blocks, config.teacher_ghosts, config.teacher_depth)
    key = (*kind, config.width, config.samples, config.seed, features.start, features.stop)
    if _all_have(key, parallel):
        _cache.move_to_end(key)
    else:
        _cache[key] = _make(config, features, parallel)
        while len(_cache) > _KEPT:
            _cache.popitem(last=False)
    return _cache[key]


def _all_have(key: Hashable, parallel: ParallelContext) -> bool:
    """Ranks may have trained with others in between, and one that lacks the data needs all to make them."""
    if parallel.single_process:
        return key in _cache
    have = torch.tensor(int(key in _cache), device=parallel.device)
    dist.all_reduce(have, dist.ReduceOp.MIN, group=parallel.group)
    return bool(have)


@torch.no_grad()
def _make(config: FFNTrainConfig, features: slice, parallel: ParallelContext) -> tuple[Tensor, Tensor]:
    teacher = _teacher(config)
    size, rank = (
        (1, 0) if parallel.single_process else (dist.get_world_size(parallel.group), dist.get_rank(parallel.group))
    )
    chunks = -(-config.samples // _CHUNK)
    x = torch.cat([_inputs(config, chunk)[:, features] for chunk in range(chunks)])
    ys: list[Tensor] = []
    for first in range(0, chunks, size):
        y = torch.zeros(_CHUNK, config.width)
        if first + rank < chunks:
            y = teacher(_inputs(config, first + rank).double()).float()
        ys += [y[:, features]] if parallel.single_process else _exchange(y, features, parallel, size)
    return x[: config.samples].clone(), torch.cat(ys)[: config.samples].clone()


def _exchange(y: Tensor, features: slice, parallel: ParallelContext, size: int) -> list[Tensor]:
    """From each rank a chunk with all features, to each rank all chunks with the features that it holds."""
    width = features.stop - features.start
    parts = y.unflatten(1, (-1, width)).transpose(0, 1)  # a part for each rank that shares a model, then the next copy
    mine = parts.repeat(size // len(parts), 1, 1).to(parallel.device)
    all_gather_objects = torch.empty_like(mine)
    dist.all_to_all_single(all_gather_objects, mine, group=parallel.group)
    return list(all_gather_objects.cpu())


def _inputs(config: FFNTrainConfig, chunk: int) -> Tensor:
    return torch.randn(_CHUNK, config.width, generator=generator(config.seed, chunk, purpose=1))


def _teacher(config: FFNTrainConfig) -> FFN:
    planted = config.data == "planted"
    ffn = FFNConfig(
        width=config.width,
        depth=config.teacher_depth,
        strategy="phantom" if planted else "dense",
        blocks=config.teacher_blocks if planted else None,
        ghosts=config.teacher_ghosts if planted else None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mixed(config.seed, 0, purpose=0))
        return FFN(ffn, dtype=torch.float64)
