"""What inference costs: models on the same ranks, forward only, timed by turns and with the energy of a sample.

    latency     a forward of the whole batch; in a turn, the slowest rank's mean over a few forwards in a row
    energy      by sensors where the meter finds some, in windows as long as those need; else modelled:
                every rank's measured seconds of compute, of exchanges that it was blocked in, and of waiting for slower
                ranks, times a profile's watts; else unavailable

Models take turns, and the order alternates, so that what drifts on a machine drifts for all of them.
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
from phantom_parallel.energy.power_profile import PowerProfile
from phantom_parallel.energy.results import MEASURED, Provenance, Scope
from phantom_parallel.energy.time_split import TimeSplitRecorder, timer_for
from phantom_parallel.infer.predictor import RowModel, own_features, predictor_of, shape_of, to_model
from phantom_parallel.nn.sharded import to_local
from phantom_parallel.ops.collectives import rank_group
from phantom_parallel.utils.layout import positive

TURN_SECONDS = 0.02  # a turn lasts about this long: forwards that take less are repeated
MOST_FORWARDS = 100  # in a turn
WARM_UP = 3
SENSOR_ROUNDS = 2  # windows for each model
SENSOR_MARGIN = 1.25  # of a window over the shortest that the sensors resolve
SENSOR_BOUND = 20.0  # seconds: sensors that need longer windows are left alone


@dataclass(frozen=True)
class Inference:
    """One model's forward passes. Counts and energies are those of all ranks together, for one sample."""

    strategy: str
    ranks: int
    batch: int
    turns: int
    latency_seconds: float  # the median over turns
    latency_p95: float
    samples_per_second: float
    flops_per_sample: float
    bytes_per_sample: float  # that ranks send each other
    joules_per_sample: float | None
    provenance: str  # of the joules: counter, integrated_power, modelled or unavailable
    blocked_share: float  # of all ranks' time in forwards
    parameters: int  # of the whole model

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Turn(NamedTuple):
    """One rank's seconds in a turn, and how many of them it was blocked in exchanges."""

    seconds: float
    blocked: float


@torch.no_grad()  # in inference mode DTensor sees whole linear maps, and cuts a Megatron pair worse
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
    """Time the models' forward passes on ``batch`` random rows; every rank of their mesh calls this.

    Args:
        models: by name, all on the same ranks and device.
        turns: how often each model has its turn, after a warm-up.
        profile: watts for modelled energy where there are no sensors. Without it, and them, energy is unavailable.
        seed: of the rows.
        meter: of the sensors; by default one of all that this machine has.
        report: told how many turns are done.
    """
    positive(batch=batch, turns=turns)
    mesh, device = place_of(models)
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
        told = all_gather_objects(_take_turns(forwards, calls, turns, clock, group, report), group)
    finally:
        clock.stop()
    timed = {name: [one[name] for one in told] for name in models}  # by name, rank and turn
    latencies = {name: _latencies(ranks, calls[name]) for name, ranks in timed.items()}
    sensed = sense(forwards, latencies, meter or EnergyMeter(group, device=device), group)
    found = {}
    for name, model in models.items():
        joules, provenance = None, Provenance.UNAVAILABLE
        if name in sensed:
            joules, provenance = sensed[name]
        elif profile is not None:
            joules, provenance = modelled_joules(timed[name], profile) / (turns * calls[name]), Provenance.MODELLED
        found[name] = _inference(model, batch, timed[name], latencies[name], joules, provenance)
    return found


def place_of(models: Mapping[str, Any]) -> tuple[DeviceMesh | None, torch.device]:
    """The mesh and device that all models share."""
    if not models:
        raise ValueError("there is no model to measure: give at least one")
    (first, one), *others = models.items()
    ranks, device = rank_group(one.mesh), to_local(next(one.parameters())).device
    for name, model in others:
        if (there := rank_group(model.mesh)) != ranks:
            raise ValueError(
                f"models must stand on the same ranks, but {first} has {ranks.size} in group {ranks.name!r} and "
                f"{name} {there.size} in group {there.name!r}: build them on one mesh"
            )
        if (where := to_local(next(model.parameters())).device) != device:
            raise ValueError(f"models must stand on the same device, but {first} is on {device} and {name} on {where}")
    return one.mesh, device


def random_rows(model: RowModel, batch: int, seed: int) -> Tensor:
    """Random rows as this rank's model takes them, the same ones on any number of ranks."""
    width, _ = predictor_of(model.config).features(model.config)
    rows = torch.randn(batch, width, generator=torch.Generator().manual_seed(seed))
    return to_model(rows[:, own_features(model)].contiguous(), model)


def _forward(model: RowModel, x: Tensor) -> Callable[[], None]:
    """A forward pass to its very end."""

    def run() -> None:
        arrived(model(x))
        synchronize(x.device)

    return run


def arrived(out: Tensor) -> Tensor:
    """A model's output once its last exchange is over."""
    return out.wait() if isinstance(out, AsyncCollectiveTensor) else out


def _warm_up(forwards: Mapping[str, Callable[[], None]], group: dist.ProcessGroup | None) -> dict[str, int]:
    """Run each model a few times; how many forwards fill its turn, the same on all ranks."""
    calls = {}
    for name, run in forwards.items():
        for _ in range(WARM_UP):
            barrier(group)
            started = time.perf_counter()
            run()
            taken = time.perf_counter() - started
        calls[name] = min(MOST_FORWARDS, math.ceil(TURN_SECONDS / max(all_gather_objects(taken, group))))
    return calls


def _take_turns(
    forwards: Mapping[str, Callable[[], None]],
    calls: Mapping[str, int],
    turns: int,
    clock: TimeSplitRecorder,
    group: dist.ProcessGroup | None,
    report: Callable[[int], None] | None,
) -> dict[str, list[Turn]]:
    """This rank's turns of each model."""
    taken: dict[str, list[Turn]] = {name: [] for name in forwards}
    for turn in range(turns):
        for name in list(forwards)[:: -1 if turn % 2 else 1]:
            run, before = forwards[name], clock.totals()
            barrier(group)
            started = time.perf_counter()
            for _ in range(calls[name]):
                with clock.step():
                    run()
            seconds = time.perf_counter() - started
            taken[name].append(Turn(seconds, clock.totals().since(before).blocked_seconds))
        if report is not None:
            report(turn + 1)
    return taken


def _latencies(ranks: list[list[Turn]], calls: int) -> list[float]:
    """Seconds of a forward in each turn: the slowest rank's."""
    return [max(turn.seconds for turn in together) / calls for together in zip(*ranks, strict=True)]


def modelled_joules(ranks: list[list[Turn]], profile: PowerProfile) -> float:
    """The energy of all ranks over all turns, by measured seconds; a rank that is done waits for the slowest."""
    joules = 0.0
    for together in zip(*ranks, strict=True):
        slowest = max(turn.seconds for turn in together)
        for turn in together:
            computing = max(turn.seconds - turn.blocked, 0.0)
            joules += profile.joules(computing, turn.blocked, slowest - turn.seconds)
    return joules


def sense(
    forwards: Mapping[str, Callable[[], None]],
    latencies: Mapping[str, list[float]],
    meter: EnergyMeter,
    group: dist.ProcessGroup | None,
) -> dict[str, tuple[float, Provenance]]:
    """Joules of a forward by sensors, for all models or, where those are not there or fail for one, for none."""
    here = [spec.shortest_window for spec in meter.discovery.specs if spec.scope is Scope.DEVICE]
    shortest = max(all_gather_objects(max(here, default=0.0), group))
    if not 0 < SENSOR_MARGIN * shortest <= SENSOR_BOUND:
        return {}
    joules, done = dict.fromkeys(forwards, 0.0), dict.fromkeys(forwards, 0)
    kinds = set()
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
            done[name] += calls
            kinds.add(total.provenance)
    if len(kinds) > 1:
        return {}
    return {name: (joules[name] / done[name], kinds.copy().pop()) for name in forwards}


def p95(seconds: Sequence[float]) -> float:
    """What 95 % of them do not exceed."""
    return sorted(seconds)[math.ceil(0.95 * len(seconds)) - 1]


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
        flops_per_sample=2 * shape.over_all_ranks(shape.multiply_adds("forward")) / batch,
        bytes_per_sample=shape.over_all_ranks(shape.moved_bytes("forward")) / batch,
        joules_per_sample=None if joules is None else joules / batch,
        provenance=str(provenance),
        blocked_share=sum(turn.blocked for turn in every) / sum(turn.seconds for turn in every),
        parameters=shape.model_parameters,
    )
