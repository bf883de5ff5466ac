import os
import zlib
from collections import defaultdict
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


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what ``sampled(n)`` leaves out: all but a fixed one in n of the parameters of a test."""
    tests = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("sampled"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        (share,) = cases[0].get_closest_marker("sampled").args
        cases.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        for item in cases[-(-len(cases) // share) :]:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Restore the environment: a process that joins an external launch sets the variables of torchrun in it."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


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
