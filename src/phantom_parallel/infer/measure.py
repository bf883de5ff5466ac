"""The cost of inference: forward passes of models on the same ranks, timed in turns, and the energy of a sample.

    latency     a forward pass of the whole batch; in a turn, the slowest rank's mean over a few consecutive passes
    energy      measured by sensors if there are any, in windows of the length that they need; otherwise modelled as
                every rank's measured seconds of compute, of being blocked in exchanges, and of waiting for slower
                ranks, times the watts of a profile; otherwise unavailable

Models take turns in alternating order, so that drift of the machine affects all of them alike.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh

from phantom_parallel.distributed.objects import all_gather_objects, barrier, check_agreement
from phantom_parallel.energy.meter import EnergyMeter, synchronize
from phantom_parallel.energy.power import PowerProfile
from phantom_parallel.energy.results import MEASURED, Provenance, Scope
from phantom_parallel.energy.time_split import TimeSplitRecorder, timer_for
from phantom_parallel.infer.predictor import RowModel, own_features, predictor_of, shape_of, to_model
from phantom_parallel.nn.sharded import to_local
from phantom_parallel.ops.collectives import rank_group
from phantom_parallel.utils.layout import positive

TURN_SECONDS = 0.02  # approximate length of a turn: shorter forward passes are repeated
MAX_FORWARDS = 100  # of a turn
WARM_UP = 3  # forward passes
LEAST_FOR_P95 = 20  # measurements: of fewer, the 95th percentile is the maximum
SENSOR_ROUNDS = 2  # windows for each model
SENSOR_MARGIN = 1.25  # length of a window relative to the shortest that the sensors resolve
SENSOR_BOUND = 20.0  # seconds: sensors that need longer windows are not used


@dataclass(frozen=True)
class Inference:
    """The cost of one model's forward passes. Counts and energies are sums over all ranks, for one sample.

    Args:
        strategy: How the model is parallelised.
        ranks: Number of ranks.
        batch: Rows of a forward pass.
        turns: Number of turns.
        latency_seconds: Median time of a forward pass over turns.
        latency_p95: The 95th percentile; None if there are fewer than 20 turns.
        samples_per_second: Throughput.
        flops_per_sample: FLOPs.
        bytes_per_sample: Bytes that ranks send to each other.
        joules_per_sample: Energy; None if unavailable.
        provenance: Provenance of the energy: counter, integrated_power, modelled or unavailable.
        blocked_share: Share of all ranks' time in forward passes that they were blocked in exchanges.
        parameters: Parameters of the whole model.
    """

    strategy: str
    ranks: int
    batch: int
    turns: int
    latency_seconds: float
    latency_p95: float | None
    samples_per_second: float
    flops_per_sample: float
    bytes_per_sample: float
    joules_per_sample: float | None
    provenance: str
    blocked_share: float
    parameters: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Turn(NamedTuple):
    """Seconds of one rank in a turn, and the part of them that it was blocked in exchanges."""

    seconds: float
    blocked: float


@torch.no_grad()  # in inference mode DTensor chooses slower layouts for a Megatron pair
def measure(
    models: Mapping[str, RowModel],
    batch: int,
    *,
    turns: int = 20,
    profile: PowerProfile | None = None,
    seed: int = 0,
    meter: EnergyMeter | None = None,
    report: Callable[[int], None] | None = None,
) -> dict[str, Inference]:
    """Time the models' forward passes on random rows. Every rank of their mesh calls this.

    Args:
        models: The models by name, all on the same ranks and device.
        batch: Rows of a forward pass.
        turns: Number of turns of each model, after a warm-up.
        profile: Watts of modelled energy if there are no sensors. Without both, energy is unavailable.
        seed: Seed of the rows.
        meter: The energy meter; by default one with all sensors of this machine.
        report: Called with the number of finished turns after each.
    """
    positive(batch=batch, turns=turns)
    mesh, device = mesh_and_device(models)
    named = {name: str(model.config) for name, model in models.items()}
    check_agreement(
        "what to measure", {"models": str(named), "batch": batch, "turns": turns, "profile": str(profile)}, mesh
    )
    group = None if mesh is None else mesh.get_group()
    forwards = {name: _forward(model, random_rows(model, batch, seed)) for name, model in models.items()}
    clock = TimeSplitRecorder(device.type, timer_for(device))
    calls = _warm_up(forwards, group)
    clock.start()
    try:
        gathered = all_gather_objects(_take_turns(forwards, calls, turns, clock, group, report), group)
    finally:
        clock.stop()
    timed = {name: [rank[name] for rank in gathered] for name in models}  # by name, rank and turn
    latencies = {name: _latencies(ranks, calls[name]) for name, ranks in timed.items()}
    sensed = measure_joules(forwards, latencies, meter or EnergyMeter(group, device=device), group)
    costs = {}
    for name, model in models.items():
        joules, provenance = None, Provenance.UNAVAILABLE
        if name in sensed:
            joules, provenance = sensed[name]
        elif profile is not None:
            joules, provenance = modelled_joules(timed[name], profile) / (turns * calls[name]), Provenance.MODELLED
        costs[name] = _inference(model, batch, timed[name], latencies[name], joules, provenance)
    return costs


def mesh_and_device(models: Mapping[str, Any]) -> tuple[DeviceMesh | None, torch.device]:
    """Return the mesh and device of the models.

    Raises:
        ValueError: If there is no model, or if they are on different ranks or devices.
    """
    if not models:
        raise ValueError("there is no model to measure: give at least one")
    (first_name, first), *others = models.items()
    ranks, device = rank_group(first.mesh), to_local(next(first.parameters())).device
    for name, model in others:
        if (other_ranks := rank_group(model.mesh)) != ranks:
            raise ValueError(
                f"models must be on the same ranks, but {first_name} has {ranks.size} in group {ranks.name!r} and "
                f"{name} {other_ranks.size} in group {other_ranks.name!r}: build them on one mesh"
            )
        if (other_device := to_local(next(model.parameters())).device) != device:
            raise ValueError(
                f"models must be on the same device, but {first_name} is on {device} and {name} on {other_device}"
            )
    return first.mesh, device


def random_rows(model: RowModel, batch: int, seed: int) -> Tensor:
    """Draw random rows as inputs of this rank's model, the same on any number of ranks."""
    width, _ = predictor_of(model.config).features(model.config)
    rows = torch.randn(batch, width, generator=torch.Generator().manual_seed(seed))
    return to_model(rows[:, own_features(model)].contiguous(), model)


def _forward(model: RowModel, x: Tensor) -> Callable[[], None]:
    """Return a function that runs a forward pass and waits for its result."""

    def run() -> None:
        wait_for(model(x))
        synchronize(x.device)

    return run


def wait_for(out: Tensor) -> Tensor:
    """Wait for the last exchange of a model's output."""
    return out.wait() if isinstance(out, AsyncCollectiveTensor) else out


def _warm_up(forwards: Mapping[str, Callable[[], None]], group: dist.ProcessGroup | None) -> dict[str, int]:
    """Run each model a few times. Returns the number of forward passes of a turn, the same on all ranks."""
    calls = {}
    for name, run in forwards.items():
        for _ in range(WARM_UP):
            barrier(group)
            started = time.perf_counter()
            run()
            seconds = time.perf_counter() - started
        calls[name] = min(MAX_FORWARDS, math.ceil(TURN_SECONDS / max(all_gather_objects(seconds, group))))
    return calls


def _take_turns(
    forwards: Mapping[str, Callable[[], None]],
    calls: Mapping[str, int],
    turns: int,
    clock: TimeSplitRecorder,
    group: dist.ProcessGroup | None,
    report: Callable[[int], None] | None,
) -> dict[str, list[Turn]]:
    """Time this rank's turns of each model."""
    measured: dict[str, list[Turn]] = {name: [] for name in forwards}
    for turn in range(turns):
        for name in list(forwards)[:: -1 if turn % 2 else 1]:
            run, before = forwards[name], clock.totals()
            barrier(group)
            started = time.perf_counter()
            for _ in range(calls[name]):
                with clock.step():
                    run()
            seconds = time.perf_counter() - started
            measured[name].append(Turn(seconds, clock.totals().since(before).blocked_seconds))
        if report is not None:
            report(turn + 1)
    return measured


def _latencies(ranks: list[list[Turn]], calls: int) -> list[float]:
    """Return the seconds of a forward pass in each turn, on the slowest rank."""
    return [max(turn.seconds for turn in simultaneous) / calls for simultaneous in zip(*ranks, strict=True)]


def modelled_joules(ranks: list[list[Turn]], profile: PowerProfile) -> float:
    """Model the energy of all ranks over all turns. A rank that has finished waits idle for the slowest."""
    joules = 0.0
    for simultaneous in zip(*ranks, strict=True):
        slowest = max(turn.seconds for turn in simultaneous)
        for turn in simultaneous:
            computing = max(turn.seconds - turn.blocked, 0.0)
            joules += profile.joules(computing, turn.blocked, slowest - turn.seconds)
    return joules


def measure_joules(
    forwards: Mapping[str, Callable[[], None]],
    latencies: Mapping[str, list[float]],
    meter: EnergyMeter,
    group: dist.ProcessGroup | None,
) -> dict[str, tuple[float, Provenance]]:
    """Measure the joules of a forward pass with sensors. Empty if there are none, or if they fail for one model."""
    windows = [spec.shortest_window for spec in meter.discovery.specs if spec.scope is Scope.DEVICE]
    shortest = max(all_gather_objects(max(windows, default=0.0), group))
    if not 0 < SENSOR_MARGIN * shortest <= SENSOR_BOUND:
        return {}
    joules, counts = dict.fromkeys(forwards, 0.0), dict.fromkeys(forwards, 0)
    provenances = set()
    for turn in range(SENSOR_ROUNDS):
        for name in list(forwards)[:: -1 if turn % 2 else 1]:
            calls = math.ceil(SENSOR_MARGIN * shortest / statistics.median(latencies[name]))
            with meter.window(name.replace("/", "-")) as window:
                for _ in range(calls):
                    forwards[name]()
            total = window.result.total
            if total.joules is None or not total.valid or total.provenance not in MEASURED:
                return {}  # the same result on all ranks
            joules[name] += total.joules
            counts[name] += calls
            provenances.add(total.provenance)
    if len(provenances) > 1:
        return {}
    provenance = provenances.pop()
    return {name: (joules[name] / counts[name], provenance) for name in forwards}


def p95(seconds: Sequence[float]) -> float | None:
    """Return the 95th percentile; None for fewer than 20 measurements, of which it would be the largest."""
    return sorted(seconds)[math.ceil(0.95 * len(seconds)) - 1] if len(seconds) >= LEAST_FOR_P95 else None


def _inference(
    model: RowModel,
    batch: int,
    ranks: list[list[Turn]],
    latencies: list[float],
    joules: float | None,
    provenance: Provenance,
) -> Inference:
    shape = shape_of(model, batch)
    every = [turn for rank in ranks for turn in rank]
    return Inference(
        strategy=model.config.strategy,
        ranks=shape.ranks,
        batch=batch,
        turns=len(latencies),
        latency_seconds=statistics.median(latencies),
        latency_p95=p95(latencies),
        samples_per_second=batch / statistics.fmean(latencies),
        flops_per_sample=2 * shape.over_all_ranks(lambda shape: shape.multiply_adds("forward")) / batch,
        bytes_per_sample=shape.over_all_ranks(lambda shape: shape.moved_bytes("forward")) / batch,
        joules_per_sample=None if joules is None else joules / batch,
        provenance=str(provenance),
        blocked_share=sum(turn.blocked for turn in every) / sum(turn.seconds for turn in every),
        parameters=shape.model_parameters,
    )
