"""The split into compute, exposed communication and idle time, on clocks that advance when they are read."""

import _thread
import threading
from collections.abc import Callable
from itertools import count

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from phantom_parallel import PhantomLinear
from phantom_parallel.energy import EnergyMeter
from phantom_parallel.energy.results import TimeSplit
from phantom_parallel.energy.time_split import TimeSplitRecorder, observe_waits
from phantom_parallel.utils.timers import EventTimer, HostTimer
from tests.energy.simulated import FakeClock

WAIT = "_c10d_functional::wait_tensor"


def hooked() -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(WAIT, "CPU")
    return has_kernel and "time_split.py" in torch._C._dispatch_dump(WAIT)


class Counter:
    """Counts the waits that it observes."""

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


def functional(mesh):
    return lambda: funcol.all_reduce(torch.ones(4), "sum", mesh.get_group()) + 1


def dtensor(mesh):
    x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    return lambda: x.redistribute(mesh, [Replicate()]).to_local() + 1


def classic(mesh):
    return lambda: dist.all_reduce(torch.ones(4), group=mesh.get_group())


def count_waits(make: str) -> int:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    work = globals()[make](mesh)
    work()  # not observed: compiles
    counter = Counter()
    with observe_waits("cpu", counter):
        assert hooked()
        work()
    observed = counter.begun
    assert counter.ended == observed
    work()
    assert counter.begun == observed
    assert not hooked()
    return observed


def count_all_waits() -> list[int]:
    return [count_waits(make) for make in ("phantom", "functional", "dtensor", "classic")]


def test_every_kind_of_wait_is_observed_and_only_while_an_observer_is_registered(ranks):
    assert ranks(2)(count_all_waits) == [[2, 1, 1, 1]] * 2


def measured_split(steps: int) -> tuple[TimeSplit, int]:
    """Measure with a clock that ticks when it is read: a wait takes exactly one tick, whatever the machine does."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ticks = count()
    meter = EnergyMeter(
        dist.group.WORLD, sources=[], device="cpu", time_split=True, timer=HostTimer(lambda: next(ticks))
    )
    work = phantom(mesh)
    with meter.window("train") as window:
        for _ in range(steps):
            with window.step():
                work()
    return window.result.time_splits


def test_the_splits_of_all_ranks_are_part_of_the_result(ranks):
    for splits in ranks(2)(measured_split, 5):
        assert [split.rank for split in splits] == [0, 1]
        assert [split.communication_seconds for split in splits] == [10, 10]  # two waits per step
        # A step reads the clock at its ends and twice for each wait: five ticks, of which two are waits.
        assert [split.compute_seconds for split in splits] == [15, 15]


@pytest.mark.parametrize(("steps", "expected"), [(2, (6.0, 4.0, 5.0)), (0, (5.0, 2.0, 0.0))])
def test_what_lies_outside_steps_is_idle_and_a_window_without_steps_is_one(steps, expected):
    clock = FakeClock()
    meter = EnergyMeter(sources=[], clock=clock, device="cpu", time_split=True)

    def blocked(seconds: float) -> None:
        mark = window._recorder.begin_wait()
        clock.now += seconds
        window._recorder.end_wait(mark)

    with meter.window("train") as window:
        clock.now += 5.0  # loading data
        blocked(2.0)  # outside steps, but communication too
        for _ in range(steps):
            with window.step():
                clock.now += 3.0
                blocked(1.0)
    split = window.result.mean_time_split
    assert split.seconds == pytest.approx(window.result.seconds)
    assert (split.compute_seconds, split.communication_seconds, split.idle_seconds) == pytest.approx(expected)


def wait_beside_a_step(start: Callable[[Callable[[], None]], None]) -> float:
    """Seconds that a step of two ticks is blocked while another thread, started by ``start``, waits for a tick."""
    ticks, done = count(), threading.Event()
    recorder = TimeSplitRecorder("cpu", HostTimer(lambda: next(ticks)))

    def wait() -> None:
        torch.ops._c10d_functional.wait_tensor(torch.ones(1))
        done.set()

    with recorder, recorder.step():
        start(wait)
        assert done.wait(60)
    return recorder.totals().blocked_seconds


def test_a_wait_of_another_thread_does_not_block_the_step_but_one_of_autograds_does():
    assert wait_beside_a_step(lambda wait: threading.Thread(target=wait).start()) == 0
    assert wait_beside_a_step(lambda wait: _thread.start_new_thread(wait, ())) == 1  # which Python did not start


class FakeEvent:
    """An event on a stream whose work takes ``FakeEvent.device_seconds`` in total; reached once it is drained."""

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


def test_on_an_accelerator_events_measure_how_long_the_stream_was_stalled():
    """The host runs ahead of the device, so its clock does not advance."""
    FakeEvent.device_seconds = 0.0
    clock = TimeSplitRecorder("cpu", EventTimer(FakeEvent))
    before = clock.totals()
    for _ in range(3):
        with clock.step():
            FakeEvent.device_seconds += 2.0
            mark = clock.begin_wait()
            FakeEvent.device_seconds += 0.5
            clock.end_wait(mark)
    compute, communication = clock.totals().since(before).busy(body_seconds=10.0)
    assert (compute, communication) == pytest.approx((6.0, 1.5))
