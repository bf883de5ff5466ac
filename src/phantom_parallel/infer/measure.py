"""The cost of calls such as forward passes of models on the same ranks, timed in turns of alternating order.

seconds     in a turn, the slowest rank's mean over a few consecutive calls; the median over turns
counts      FLOPs and bytes that are sent, by the ledger in a call that is not timed
energy      measured by sensors if there are any; otherwise every rank's seconds of compute, blocked in collectives
            and waiting for slower ranks, times the watts of a profile; otherwise unavailable
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from phantom_parallel.cost.calibrate import profile_name
from phantom_parallel.cost.hardware import load_profile, user_directory
from phantom_parallel.cost.ledger import Ledger
from phantom_parallel.distributed.launch import launch_device_type
from phantom_parallel.distributed.objects import all_gather_objects, barrier, check_agreement
from phantom_parallel.energy.meter import EnergyMeter
from phantom_parallel.energy.power import PowerProfile, load_power_profile
from phantom_parallel.energy.results import MEASURED, Provenance
from phantom_parallel.energy.time_split import TimeSplitRecorder
from phantom_parallel.utils.layout import positive
from phantom_parallel.utils.strategies import WireFormat, check_wire
from phantom_parallel.utils.timers import timer_for

TURN_SECONDS = 0.02  # approximate length of a turn: shorter calls are repeated
MAX_REPEATS = 100  # of a call in a turn
WARM_UP = 3  # calls
MIN_P95_TURNS = 20  # of fewer turns, the 95th percentile is the maximum
SENSOR_MARGIN = 2.5  # length of a window relative to the shortest that the sensors resolve
MAX_SENSOR_SECONDS = 20.0  # sensors that need longer windows are not used


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of commands that run and measure a trained model. The texts under the fields are their help."""

    model: Path
    """Folder of a model, such as OUT/model of phantom train."""
    turns: int = 20
    """How often each model is timed, in turn."""
    ranks: int = 1
    """Ranks that share the model."""
    wire: WireFormat = "full"
    """Format in which features are sent between ranks."""
    profile: str | None = None
    """Hardware profile whose watts the energy is modelled with if there are no sensors; by default this machine's as
    phantom machine measure --watts wrote it, otherwise watts that are assumed of a CPU core. See phantom machine
    show."""

    def __post_init__(self) -> None:
        positive(ranks=self.ranks, turns=self.turns)
        check_wire(self.wire)
        object.__setattr__(self, "model", Path(self.model).absolute())

    def describe(self, power: "PowerProfile | None") -> dict[str, Any]:
        """What a report says of the run, with the watts of modelled energy."""
        profile = {"profile": power and power.name, "profile_source": power and power.source}
        return {"model": str(self.model), "ranks": self.ranks, "wire": self.wire, **profile}


class Call(NamedTuple):
    """What to measure: a function that waits for its result, and the samples or tokens that it computes."""

    run: Callable[[], object]
    items: int


@dataclass(frozen=True)
class Cost:
    """The cost of a call. Counts and energies are sums over all ranks for one item: a sample, or a token of one row."""

    seconds: float  # median time of a call
    seconds_p95: float | None  # the 95th percentile; None if there are fewer than 20 turns
    items_per_second: float
    flops: float
    bytes: float  # that ranks send to each other
    joules: float | None  # None if unavailable
    provenance: str  # of the energy: counter, integrated_power, modelled or unavailable
    blocked_share: float  # of all ranks' time, in which they were blocked in collectives
    least_joules: float | None = None  # of the FLOPs at the peak of the profile
    mfu: float | None = None  # share of the FLOPs that all ranks could do at that peak
    exchanges: dict[str, int] = field(default_factory=dict)  # of this rank in a call, by operation and bytes sent

    def describe(self, model: nn.Module) -> dict[str, Any]:
        """The cost, and the parameters of the model, as plain data."""
        return asdict(self) | {"parameters": sum(parameter.numel() for parameter in model.parameters())}

    def inference_result(self, model: nn.Module) -> dict[str, Any]:
        """Fields of `study.results.InferenceResult`."""
        names = {"seconds": "latency_seconds", "seconds_p95": "latency_p95", "items_per_second": "samples_per_second"}
        names |= {name: f"{name}_per_sample" for name in ("flops", "bytes", "joules", "least_joules")}
        return {names.get(name, name): value for name, value in self.describe(model).items()}


@torch.no_grad()  # in inference mode DTensor chooses slower layouts for a Megatron pair
def measure_calls(
    calls: Mapping[str, Call],
    mesh: DeviceMesh | None,
    device: torch.device,
    *,
    turns: int = 20,
    profile: PowerProfile | None = None,
    meter: EnergyMeter | None = None,
    report: Callable[[int], None] | None = None,
) -> dict[str, Cost]:
    """Measure calls. Every rank of the mesh calls this; None is one process.

    Each call has so many ``turns`` after a warm-up, and ``report`` is called with the number of those that are done.
    ``profile`` has the watts of modelled energy if there are no sensors; the default ``meter`` has all those of this
    rank's device.
    """
    check_agreement("what to measure", {"calls": ", ".join(calls), "turns": turns}, mesh)
    group = None if mesh is None else mesh.get_group()
    counts, repeats, exchanges = {}, {}, {}
    for name, call in calls.items():
        with Ledger() as ledger:
            call.run()
        exchanges[name] = Counter[str]()
        for entry, count in ledger.collectives.items():
            exchanges[name][f"{entry.op} {entry.moved:,} B"] += count
        counts[name] = np.sum(all_gather_objects([ledger.flops, ledger.moved_bytes], group), 0) / call.items
        for _ in range(WARM_UP):
            barrier(group)
            started = time.perf_counter()
            call.run()
            seconds = time.perf_counter() - started
        repeats[name] = min(MAX_REPEATS, math.ceil(TURN_SECONDS / max(all_gather_objects(seconds, group))))
    timed: dict[str, list[list[float]]] = {name: [] for name in calls}
    with TimeSplitRecorder(device.type, timer_for(device)) as clock:
        for turn in range(turns):
            for name in list(calls)[:: -1 if turn % 2 else 1]:
                before = clock.totals()
                barrier(group)
                started = time.perf_counter()
                for _ in range(repeats[name]):
                    with clock.step():
                        calls[name].run()
                seconds = time.perf_counter() - started
                timed[name].append([seconds, clock.totals().since(before).blocked_seconds])
            if report is not None:
                report(turn + 1)
    gathered = all_gather_objects(timed, group)
    times = {name: np.array([rank[name] for rank in gathered]) for name in calls}  # (ranks, turns, 2)
    latencies = {name: times[name][..., 0].max(0) / repeats[name] for name in calls}
    sensed = _measure_joules(calls, latencies, meter or EnergyMeter(group, device=device), mesh)
    costs, peak = {}, None if profile is None else profile.peak_flops
    for name, call in calls.items():
        joules, provenance = sensed.get(name, (None, Provenance.UNAVAILABLE))
        if joules is None and profile is not None:
            joules, provenance = modelled_joules(times[name], profile) / (turns * repeats[name]), Provenance.MODELLED
        total, blocked = times[name].sum((0, 1))
        median = float(np.median(latencies[name]))
        p95 = float(np.quantile(latencies[name], 0.95, method="inverted_cdf"))
        costs[name] = Cost(
            seconds=median,
            seconds_p95=p95 if turns >= MIN_P95_TURNS else None,
            items_per_second=call.items / float(latencies[name].mean()),
            flops=float(counts[name][0]),
            bytes=float(counts[name][1]),
            joules=None if joules is None else joules / call.items,
            provenance=str(provenance),
            blocked_share=float(blocked / total),
            least_joules=None if profile is None else profile.least_joules(float(counts[name][0])),
            mfu=float(counts[name][0]) * call.items / (len(times[name]) * peak * median) if peak else None,
            exchanges=dict(exchanges[name]),
        )
    return costs


def modelled_joules(times: NDArray[np.float64], profile: PowerProfile) -> float:
    """Modelled energy of all ranks from (ranks, turns, 2) seconds: of a turn, and those blocked. Others wait idle."""
    seconds, blocked = times[..., 0], times[..., 1]
    computing, idle = np.maximum(seconds - blocked, 0), seconds.max(0) - seconds
    return profile.joules(float(computing.sum()), float(blocked.sum()), float(idle.sum()))


def _measure_joules(
    calls: Mapping[str, Call], latencies: Mapping[str, NDArray[np.float64]], meter: EnergyMeter, mesh: DeviceMesh | None
) -> dict[str, tuple[float, Provenance]]:
    """Measure the joules of each call with sensors. Empty if there are none, or if they fail for one call."""
    windows = [spec.shortest_window for spec in meter.discovery.specs]
    shortest = max(all_gather_objects(max(windows, default=0.0), mesh))
    if not 0 < SENSOR_MARGIN * shortest <= MAX_SENSOR_SECONDS:
        return {}
    joules: dict[str, tuple[float, Provenance]] = {}
    for name, call in calls.items():
        repeats = math.ceil(SENSOR_MARGIN * shortest / np.median(latencies[name]))
        with meter.window(name.replace("/", "-")) as window:
            for _ in range(repeats):
                call.run()
        total = window.result.total
        if total.joules is None or not total.valid or total.provenance not in MEASURED:
            return {}  # the same result on all ranks
        joules[name] = total.joules / repeats, total.provenance
    return joules if len({provenance for _, provenance in joules.values()}) == 1 else {}


def default_power_profile(name: str | None, ranks: int) -> PowerProfile | None:
    """The watts of a profile; by default this machine's if measured, else assumed for CPU cores and None for others."""
    if name is None:
        if launch_device_type(ranks) != "cpu":
            return None
        calibrated = user_directory() / f"{profile_name(ranks)}.toml"
        if calibrated.is_file() and (profile := load_profile(calibrated)).has_power:
            return PowerProfile.from_hardware(profile)
    return load_power_profile(name, ranks)
