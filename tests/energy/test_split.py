"""Compute, exposed communication and idle: what is counted as what, on clocks that tick when looked at."""

import threading
import time
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from phantom_parallel import PhantomLinear
from phantom_parallel.energy import EnergyMeter, PowerProfile, Split
from phantom_parallel.energy.split import EventTimer, HostTimer, SplitClock, timer_for
from phantom_parallel.energy.waits import listening
from tests.energy.simulated import FakeClock

WAIT = "_c10d_functional::wait_tensor"


def hooked() -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(WAIT, "CPU") and "energy" in torch._C._dispatch_dump(WAIT)


class Counter:
    """Counts the waits it is told of."""

    def __init__(self) -> None:
        self.begun = self.ended = 0

    def begin_wait(self) -> str:
        self.begun += 1
        return "mark"

    def end_wait(self, mark: str) -> None:
        assert mark == "mark"
        self.ended += 1


def phantom(mesh):
    layer = PhantomLinear(16, 16, blocks=4, ghosts=2, mesh=mesh)
    return lambda: layer(torch.ones(3, 16 // mesh.size(), requires_grad=True)).sum().backward()


def compiled(mesh):
    layer = PhantomLinear(16, 16, blocks=4, ghosts=2, mesh=mesh)
    run = torch.compile(layer, backend="aot_eager", fullgraph=True)
    return lambda: run(torch.ones(3, 16 // mesh.size(), requires_grad=True)).sum().backward()


def functional(mesh):
    return lambda: funcol.all_reduce(torch.ones(4), "sum", mesh.get_group()) + 1


def dtensor(mesh):
    x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    return lambda: x.redistribute(mesh, [Replicate()]).to_local() + 1


def classic(mesh):
    return lambda: dist.all_reduce(torch.ones(4), group=mesh.get_group())


def count_waits(make: str) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    work = globals()[make](mesh)
    work()  # unheard: compiles, and shows that nothing is left behind
    counter = Counter()
    with listening("cpu", counter):
        assert hooked()
        work()
    heard = counter.begun
    assert counter.ended == heard
    work()
    assert counter.begun == heard
    assert not hooked()
    return heard


@pytest.mark.parametrize(
    ("make", "waits"), [("phantom", 2), ("compiled", 2), ("functional", 1), ("dtensor", 1), ("classic", 1)]
)
def test_every_way_to_wait_for_an_exchange_is_heard_and_only_while_listened_to(ranks, make, waits):
    assert ranks(2)(count_waits, make) == [waits, waits]


def other_threads_run_during_a_wait(folder: str) -> bool:
    """Rank 1 joins the exchange when a thread of rank 0 tells it to, which it does while rank 0's main thread waits."""
    signal, waiting = Path(folder) / "go", threading.Event()

    class Listener(Counter):
        def begin_wait(self) -> str:
            waiting.set()
            return super().begin_wait()

    def tell() -> None:
        waiting.wait()
        time.sleep(0.05)  # so that the wait has begun in earnest
        signal.touch()

    group = dist.group.WORLD.group_name
    if dist.get_rank() == 1:
        while not signal.exists():
            time.sleep(0.001)
        torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", group))
        return True
    thread = threading.Thread(target=tell)
    thread.start()
    with listening("cpu", Listener()):
        torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", group))
    thread.join()
    return True


def test_a_wait_that_is_listened_to_does_not_hold_up_other_threads(ranks, tmp_path):
    assert ranks(2)(other_threads_run_during_a_wait, str(tmp_path)) == [True, True]


def test_listeners_are_independent():
    first, second = Counter(), Counter()
    original = dist.Work.wait
    with listening("cpu", first):
        with listening("cpu", second):
            torch.ops._c10d_functional.wait_tensor(torch.ones(1))
        torch.ops._c10d_functional.wait_tensor(torch.ones(1))
        assert dist.Work.wait is not original
    assert (first.begun, second.begun) == (2, 1)
    assert dist.Work.wait is original


def measured_split(steps: int) -> tuple[Split, int]:
    """A clock that ticks when it is looked at: a wait takes one tick exactly, whatever the machine does."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ticks = count()
    meter = EnergyMeter(dist.group.WORLD, sources=[], device="cpu", split=True, timer=HostTimer(lambda: next(ticks)))
    work = phantom(mesh)
    with meter.window("train") as window:
        for _ in range(steps):
            with window.step():
                work()
    return window.result.splits


def test_the_splits_of_all_ranks_are_part_of_the_result(ranks):
    for splits in ranks(2)(measured_split, 5):
        assert [split.rank for split in splits] == [0, 1]
        assert [split.communication for split in splits] == [10, 10]  # two waits a step
        # A step reads the clock at its ends and twice for each wait: five ticks, of which two are waits.
        assert [split.compute for split in splits] == [15, 15]


class Waiting:
    """A body of work in which time is spent as told."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.meter = EnergyMeter(sources=[], clock=self.clock, device="cpu", split=True)

    def compute(self, seconds: float) -> None:
        self.clock.now += seconds

    def blocked(self, seconds: float) -> None:
        mark = self.meter._split.begin_wait()
        self.clock.now += seconds
        self.meter._split.end_wait(mark)


def parts(window) -> tuple[float, float, float]:
    split = window.result.split
    assert split.seconds == pytest.approx(window.seconds)
    return pytest.approx((split.compute, split.communication, split.idle))


def test_what_lies_outside_steps_is_idle():
    work = Waiting()
    with work.meter.window("train") as window:
        work.compute(5.0)  # loading data
        for _ in range(2):
            with window.step():
                work.compute(3.0)
                work.blocked(1.0)
    assert parts(window) == (6.0, 2.0, 5.0)


def test_a_window_without_steps_is_one_step():
    work = Waiting()
    with work.meter.window("train") as window:
        work.compute(5.0)
        work.blocked(1.0)
    assert parts(window) == (5.0, 1.0, 0.0)


def test_waits_outside_steps_are_communication_too():
    work = Waiting()
    with work.meter.window("train") as window:
        with window.step():
            work.compute(3.0)
        work.blocked(2.0)
        work.compute(1.0)
    assert parts(window) == (3.0, 2.0, 1.0)


def test_windows_within_a_step_take_their_share_of_it():
    work = Waiting()
    with work.meter.window("train") as outer, outer.step():
        work.compute(3.0)
        with work.meter.window("inner") as inner:
            work.compute(2.0)
            work.blocked(1.0)
        work.compute(4.0)
    assert parts(inner) == (2.0, 1.0, 0.0)
    assert parts(outer) == (9.0, 1.0, 0.0)


@pytest.mark.parametrize("in_step", [True, False])
def test_the_meters_own_readings_are_idle_in_the_window_around(in_step):
    work = Waiting()
    work.meter._peers.barrier = lambda: work.blocked(0.5)
    with work.meter.window("train") as outer:
        step = outer.step() if in_step else None
        if step:
            step.__enter__()
        work.compute(3.0)
        with work.meter.window("inner"):
            work.compute(2.0)
        if step:
            step.__exit__(None, None, None)
    assert parts(outer) == (5.0, 0.0, 2.0)  # two barriers to open the inner one, one to close it, one to close this


def test_steps_do_not_nest():
    work = Waiting()
    with (
        work.meter.window("train") as window,
        window.step(),
        pytest.raises(ValueError, match="steps do not nest"),
        window.step(),
    ):
        pass


def test_when_the_split_is_off_nothing_is_installed():
    meter = EnergyMeter(sources=[], device="cpu")
    original = dist.Work.wait
    with meter.window("train") as window, window.step():
        assert not hooked()
        assert dist.Work.wait is original
    assert window.result.splits == ()
    assert window.result.split is None


class FakeEvent:
    """An event on a stream whose work takes ``FakeEvent.device_seconds`` in all; reached when the stream is drained."""

    device_seconds = 0.0
    drained = False

    def record(self) -> None:
        self.at, self.reached = FakeEvent.device_seconds, False

    def query(self) -> bool:
        return self.reached or FakeEvent.drained

    def synchronize(self) -> None:
        self.reached = True

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert end.query()
        return (end.at - self.at) * 1e3


def test_on_an_accelerator_events_measure_how_long_the_stream_stood_still():
    """The host runs ahead: its clock stands still while the device works."""
    FakeEvent.device_seconds = 0.0
    clock = SplitClock("cpu", EventTimer(FakeEvent))
    before = clock.totals()
    for _ in range(3):
        with clock.step():
            FakeEvent.device_seconds += 2.0
            mark = clock.begin_wait()
            FakeEvent.device_seconds += 0.5
            clock.end_wait(mark)
    compute, communication = clock.totals().since(before).busy(body=10.0)
    assert (compute, communication) == pytest.approx((6.0, 1.5))


@pytest.mark.parametrize("drained", [True, False])
def test_events_are_let_go_once_the_device_has_passed_them(monkeypatch, drained):
    monkeypatch.setattr(FakeEvent, "drained", drained)
    clock = SplitClock("cpu", EventTimer(FakeEvent))
    for _ in range(2000):
        mark = clock.begin_wait()
        FakeEvent.device_seconds += 0.25
        clock.end_wait(mark)
    assert (len(clock._pending) < 1000) == drained
    assert sum(clock.totals().seconds.values()) == pytest.approx(500.0)


def test_the_cpu_is_timed_by_the_host():
    assert isinstance(timer_for(torch.device("cpu")), HostTimer)
    assert isinstance(timer_for(torch.device("cuda")), EventTimer)


def test_the_model_is_seconds_times_watts():
    profile = PowerProfile("toy", 100.0, 40.0, 10.0, source="made up")
    assert profile.joules(Split(0, "", compute=6.0, communication=2.0, idle=5.0)) == 600 + 80 + 50


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compute_watts": -1.0}, "compute_watts must be 0 W or more, got -1.0"),
        ({"communication_watts": float("nan")}, "communication_watts must be 0 W or more, got nan"),
        ({"idle_watts": 50.0}, "idle_watts=50.0 is above what the device draws at work"),
        ({"source": ""}, "source must say where the watts come from"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(change, message):
    right = {"name": "toy", "compute_watts": 100.0, "communication_watts": 40.0, "idle_watts": 10.0, "source": "x"}
    with pytest.raises(ValueError, match=message):
        PowerProfile(**(right | change))
