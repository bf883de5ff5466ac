"""Real local ranks, started once and reused: a pool of workers that run functions of the test modules.

Workers come from a fork server that has imported torch already, so that a pool of eight starts in about a second.
"""

import gc
import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

CALLS = 100  # of a pool before it is replaced: caches of DTensor keep the sockets and threads of its groups
TIMEOUT = 400.0  # seconds: far above what any test needs, so that it only ends a hang

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "hypothesis",
        "pytest",
        "torch",
        "torch._dynamo",  # optimizers and checkpointing import it on first use
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "phantom_parallel.cost.dryrun",
        "phantom_parallel.families.ffn.family",
        "phantom_parallel.families.gpt.task",
        "phantom_parallel.train.loop",
    ]
)


class RankFailed(AssertionError):
    """A function raised on a rank; the message has that rank's traceback."""


class Pool:
    """``size`` processes in one process group. ``pool(f, *args)`` runs f(*args) on each and returns their results in
    order of rank.
    """

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.size, self.calls = size, 0
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._workers = []
        for rank in range(size):
            ours, theirs = _context.Pipe()
            where = rank, size, os.path.join(self._folder.name, "store"), backend
            worker = _context.Process(target=_serve, args=(*where, theirs), daemon=True)
            worker.start()
            theirs.close()
            self._pipes.append(ours)
            self._workers.append(worker)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        self.calls += 1
        try:
            for pipe in self._pipes:
                pipe.send((function, args, kwargs))
        except OSError:
            self.close()  # so that the next test gets a new pool
            raise RankFailed("a worker has died since the last test") from None
        results: list[Any] = [None] * self.size
        waiting = dict(zip(self._pipes, range(self.size), strict=True))
        failures = {}
        while waiting:
            ready = wait(
                list(waiting), timeout=5.0 if failures else TIMEOUT
            )  # after a failure the others may hang in an exchange
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[index]
                try:
                    fine, results[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    fine, results[rank] = False, "the process died"
                if not fine:
                    failures[rank] = results[rank]
        if failures or waiting:
            self.close()
            for rank in waiting.values():
                failures.setdefault(rank, "no answer: it hangs")
            raise RankFailed("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))
        return results

    @property
    def closed(self) -> bool:
        return not self._workers

    @property
    def worn(self) -> bool:
        """Whether it is time for a new pool."""
        return self.calls >= CALLS

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.join()
        self._workers = []
        self._folder.cleanup()


class Pools:
    """``pools(size)`` is a pool of so many ranks: one of each size, until it is worn or something fails in it."""

    def __init__(self, backend: str = "gloo") -> None:
        self._pools, self._backend = dict[int, Pool](), backend

    def __call__(self, size: int) -> Pool:
        if size in self._pools and self._pools[size].worn:
            self._pools[size].close()
        if size not in self._pools or self._pools[size].closed:
            self._pools[size] = Pool(size, self._backend)
        return self._pools[size]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def _serve(rank: int, size: int, store: str, backend: str, pipe: Connection) -> None:
    import torch

    from tests.device import delayed

    torch.set_num_threads(1)
    gc.freeze()  # what is imported stays: `_replace_groups` collects after most calls, which took most of their time
    _share_device()
    delayed.register()
    _init_group(rank, size, f"{store}-0", backend)
    calls = 0
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            result = function(*args, **kwargs)
            pipe.send((True, result))
            calls += 1
            _replace_groups(rank, size, f"{store}-{calls}", backend)
        except BaseException:  # DCP's CheckpointException is one; the test must see it
            pipe.send((False, traceback.format_exc()))


def _init_group(rank: int, size: int, store: str, backend: str) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT)
    )


def _replace_groups(rank: int, size: int, store: str, backend: str) -> None:
    """Destroy all process groups if a function has made some, so that a test does not depend on those before it.

    The new default group has a store of its own, as names of groups repeat.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    from phantom_parallel.checkpoint import shards
    from phantom_parallel.ops import collectives

    gc.collect()
    groups = torch.tensor(len(_world.pg_map))
    dist.all_reduce(groups, dist.ReduceOp.MAX)  # a rank that is not of a group does not count it
    if groups == 1:
        return
    dist.destroy_process_group()
    _clear_sharding_prop_cache()  # in which equal meshes have the names of groups that are no more
    collectives.make_levels.cache_clear()
    shards._storage_groups.clear()
    _init_group(rank, size, store, backend)


def _share_device() -> None:
    """Let all process groups of this process share one gloo device.

    Each device has a thread that wakes up a hundred times a second. With one for each group, those of the groups that
    tests make, and that caches keep, take most of the time of two cores.
    """
    from torch.distributed import ProcessGroupGloo, distributed_c10d

    device = ProcessGroupGloo.create_default_device()

    class Shared(type):
        def __call__(cls, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
            options = ProcessGroupGloo._Options()  # each group writes its name into its own
            options._devices, options._threads, options._timeout = [device], 2, timeout
            return ProcessGroupGloo(store, rank, size, options)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, ProcessGroupGloo)

    distributed_c10d.ProcessGroupGloo = Shared("ProcessGroupGloo", (), {})  # type: ignore[misc, assignment]
