import os
from collections.abc import Callable, Iterator

import hypothesis
import pytest

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no compiler pool in every worker
os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # threads of several processes share few cores: spinning starves all

from tests.pool import Pool

hypothesis.settings.register_profile("no-clock", deadline=None)  # on a busy machine an example may take long
hypothesis.settings.load_profile("no-clock")


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, Pool]]:
    pools: dict[int, Pool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def ranks(_pools: dict[int, Pool]) -> Callable[[int], Pool]:
    """``ranks(4)`` is a pool of 4 local ranks, the same one for many tests unless something fails in it."""

    def pool_of(size: int) -> Pool:
        if size in _pools and _pools[size].worn:
            _pools[size].close()
        if size not in _pools or _pools[size].closed:
            _pools[size] = Pool(size)
        return _pools[size]

    return pool_of
