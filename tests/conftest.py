import os
import zlib
from collections import defaultdict
from collections.abc import Iterator

import hypothesis
import pytest

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no compiler pool in every worker
os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # threads of several processes share few cores: spinning starves all

from tests.pool import Pools

hypothesis.settings.register_profile("no-clock", deadline=None)  # on a busy machine an example may take long
hypothesis.settings.load_profile("no-clock")


# Files and folders whose tests take longest. They start first, so that all workers end at about the same time.
LONGEST = (
    *("distributed/test_clusters.py", "cli/test_doctor.py", "device/test_accelerator.py", "distributed/test_launch.py"),
    *("test_hf.py", "cli", "families/gpt", "study/test_grid.py", "conversion", "distributed", "test_documentation.py"),
    *("train", "campaign", "report"),
)


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort files, and mark as slow what ``sampled(n)`` leaves out: all but one in n of the parameters of a test."""
    order = {prefix: place for place, prefix in enumerate(LONGEST)}
    items.sort(key=lambda item: min((order[p] for p in LONGEST if item.nodeid.startswith(f"tests/{p}")), default=99))
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


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A cache of its own for this process and for ranks and commands that it starts, not the user's."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """``ranks(4)`` is a pool of 4 local ranks, the same one for many tests unless something fails in it."""
    pools = Pools()
    yield pools
    pools.close()
