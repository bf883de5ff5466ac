"""How long a step takes and what it draws, from the counts of `cost.terms` and the figures of a hardware profile.

    product      t = o + 2 b m l n / (e P) + b (m l + l n) s / M + b m n s / F      b times (m, l) by (l, n)
    ring         all-gather, reduce-scatter  (R-1) (a + w/B)      all-reduce  2 (R-1) (a + w/(R B))
    tree         all-gather, reduce-scatter  2 h a + (2R-1) w/B   all-reduce  2 h a + 2 w/B       h = ceil(log2 R)
    all-to-all   in pairs  (R-1) (a + w/B)           through others  h (a + R/2 w/B)
    send         a + w/B         broadcast  h (a + w/B)
    burst        of the bytes that a rank sends in an exchange, u pass at once: w/B is max(0, w - u)/B, and so on
    exchange     c + the cheaper way; past one node, inside nodes and between them in turn
    hidden       min(f t_exchange, time of the products named in ``hidden_by`` of the same layer and phase)
    ladder       the same, but of a map back to the stream the products of the next map from it, and the reverse
    fsdp         hidden = min(f (t_gathers - the first one), time of all products), and so backward with the scatters
    pipeline     T = sum t_s + (M-1) max t_s + 2 (M+P-1) (P-1)/P t_send     t_s: both passes of a micro-batch, stage s,
                 with the exchanges among the stage's ranks
    energy       E = P_compute t_compute + P_communication t_exposed + P_idle t_idle, for each rank
    least        E_least = P_compute F / P, of F FLOPs of all ranks      gap = E / E_least - 1      mfu = F / (R P t)

P, e: peak and efficiency of the dtype, of s bytes a word; M, F: memory and write bandwidth; o, c: overheads; a, B: a
tier's latency and bandwidth, u its burst; w as in `cost.terms`, in bytes; f: the overlap. ``docs/planning.md`` states
the assumptions. Every energy is modelled.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from phantom_parallel.cost.hardware import WORD_BYTES, Profile
from phantom_parallel.cost.terms import OPTIMIZER_STATES, LayerCost, Op, Phase, Product, Shape, Stage

PHASES = ("forward", "backward", "sync", "update")
PASSES: tuple[Phase, ...] = ("forward", "backward", "sync")  # that have products or exchanges
STREAMED = {"forward": 0, "backward": 1}  # where a layer's cost has the words of a phase's elementwise work


class PhaseTime(NamedTuple):
    """Seconds on one rank: computing, in exchanges that show, and in exchanges hidden behind computing."""

    compute: float = 0.0
    exposed: float = 0.0
    hidden: float = 0.0

    @property
    def total(self) -> float:
        """Wall-clock time: the hidden part is within compute."""
        return self.compute + self.exposed


def _summed(spans: Iterable[PhaseTime]) -> PhaseTime:
    return PhaseTime(*(sum(column) for column in zip(*spans, strict=True)))


@dataclass(frozen=True)
class StepTime:
    """A step of one rank, and the modelled energy of all devices during it; None on a machine without watts.

    ``least_joules`` would be that of the FLOPs alone, at the peak, and ``least_exchange_joules`` that of the bytes
    alone, on the faster links. ``mfu`` is the share of the devices' peak that the FLOPs of the step are.
    """

    layers: tuple[Mapping[str, PhaseTime], ...]
    phases: Mapping[str, PhaseTime]  # sums over layers
    idle: float = 0.0
    joules: float | None = None
    mfu: float | None = None
    least_joules: float | None = None
    least_exchange_joules: float | None = None

    @property
    def energy_gap(self) -> float | None:
        """How much more than the least energy it takes, relative to that."""
        return energy_gap(self.joules, self.least_joules)

    @property
    def compute(self) -> float:
        return sum(span.compute for span in self.phases.values())

    @property
    def exposed(self) -> float:
        return sum(span.exposed for span in self.phases.values())

    @property
    def hidden(self) -> float:
        return sum(span.hidden for span in self.phases.values())

    @property
    def total(self) -> float:
        return self.compute + self.exposed + self.idle


def energy_gap(joules: float | None, least: float | None) -> float | None:
    """How much more than the least energy was used, relative to that; None where either is unknown."""
    return joules / least - 1 if joules is not None and least else None


def least_joules(flops: float, profile: Profile, dtype: str) -> float | None:
    """The energy of so many FLOPs at the peak of the dtype; None where the profile has no watts, or no such peak."""
    if profile.compute_watts is None or dtype not in profile.peak:
        return None
    return flops / profile.peak[dtype].value * profile.compute_watts.value


def step_time(shape: Shape, profile: Profile, dtype: str = "fp32", phases: tuple[str, ...] = PHASES) -> StepTime:
    """A training step: forward, backward, the sum of gradients over copies, and the optimizer's update; or the
    ``phases`` of it that are run, such as forward alone in inference.
    """
    return Clock(profile, dtype).step(shape, phases)


class Clock:
    """A profile's figures as plain numbers for one dtype, with the equations above as methods."""

    def __init__(self, profile: Profile, dtype: str = "fp32") -> None:
        profile.require_dtype(dtype)
        self.profile, self.dtype, self.word_bytes = profile, dtype, WORD_BYTES[dtype]
        self._flops = profile.peak[dtype].value * profile.efficiency[dtype].value
        self._memory, self._write = profile.memory_bandwidth.value, profile.write_bandwidth.value
        self._product_overhead = profile.product_overhead_seconds.value
        self._layer_overhead = profile.layer_overhead_seconds.value
        self._collective_overhead = profile.collective_overhead_seconds.value
        self._overlap = profile.overlap.value
        self._node = int(profile.devices_per_node.value)
        self._inside, self._between = (
            (tier.latency_seconds.value, 1 / tier.bandwidth.value, tier.burst_bytes.value)
            for tier in (profile.inside, profile.between)
        )

    def product(self, product: Product) -> float:
        b, m, l, n = product.batch, product.rows, product.inner, product.columns  # noqa: E741, the equation's names
        read, written = b * (m * l + l * n) * self.word_bytes, b * m * n * self.word_bytes
        return self._product_overhead + product.flops / self._flops + read / self._memory + written / self._write

    def elementwise(self, words: float) -> float:
        """Work that only reads and writes memory."""
        return words * self.word_bytes / self._memory

    def collective(self, op: Op, ranks: int, contribution: float, stride: int = 1) -> float:
        if ranks == 1:
            return 0.0
        local = min(ranks, max(1, self._node // stride))  # of the exchange's ranks, those on one node
        nodes = -(-ranks // local)
        if nodes == 1 or op in ("send", "broadcast"):  # the slowest link of a pipeline sets its pace
            tier = self._inside if nodes == 1 else self._between
            return self._collective_overhead + _tier(op, ranks, contribution, *tier)
        if op == "all_reduce":  # reduce-scatter inside, all-reduce the shares between, all-gather inside
            share = contribution / local
            inside = 2 * _tier("all_gather", local, share, *self._inside)
            between = _tier(op, nodes, share, *self._between)
        else:  # all-gather: between nodes first, then everything inside; reduce-scatter: the same backwards
            inside = _tier(op, local, contribution * nodes, *self._inside)
            to_node = contribution * (local if op == "all_to_all" else 1)  # of all-to-all, what all of a node get
            between = _tier(op, nodes, to_node, *self._between)
        return self._collective_overhead + inside + between

    def layer(self, layer: LayerCost, phase: str) -> PhaseTime:
        """A layer's products and exchanges in one phase, and the elementwise work around it."""
        seconds: dict[str, float] = {}
        for product in layer.products:
            if product.phase == phase:
                taken = product.flops / self._flops if layer.fused else self.product(product)
                seconds[product.term] = seconds.get(product.term, 0.0) + taken
        kernel = self._product_overhead if layer.fused and seconds else 0.0
        compute = self._layer_overhead + kernel + sum(seconds.values())
        exposed = hidden = 0.0
        for exchange in layer.exchanges:
            if exchange.phase != phase:
                continue
            compute += self.elementwise(exchange.codec_words)
            contribution = exchange.contribution(self.word_bytes)
            taken = self.collective(exchange.op, exchange.ranks, contribution, exchange.stride)
            meanwhile = inf if exchange.background else sum(seconds.pop(term, 0.0) for term in exchange.hidden_by)
            covered = min(self._overlap * taken, meanwhile)
            hidden += covered  # pop: a product hides one exchange, not two
            exposed += taken - covered
        if phase in STREAMED:
            compute += self.elementwise(layer.streamed[STREAMED[phase]])
        return PhaseTime(*(layer.calls * taken for taken in (compute, exposed, hidden)))

    def step(self, shape: Shape, phases: tuple[str, ...] = PHASES) -> StepTime:
        assert shape.word_bytes == self.word_bytes
        devices, kinds, profile = shape.ranks * shape.pp * shape.dp, shape.stages(), self.profile
        profile.require_devices(devices)
        step = self._rank(shape, phases) if shape.stage is None else self._pipeline(shape.stage, kinds, phases)
        run = [phase for phase in PASSES if phase in phases]
        flops = sum(2 * like * kind.multiply_adds(phase) for kind, like in kinds for phase in run) * shape.dp
        sent = sum(like * kind.moved_bytes(phase) for kind, like in kinds for phase in run) * shape.dp
        fastest = max(profile.inside.bandwidth.value, profile.between.bandwidth.value)
        watts = profile.communication_watts
        return replace(
            step,
            joules=self._joules(step, devices),
            mfu=flops / (devices * profile.peak[self.dtype].value * step.total),
            least_joules=least_joules(flops, profile, self.dtype),
            least_exchange_joules=None if watts is None else sent / fastest * watts.value,
        )

    def _rank(self, shape: Shape, phases: tuple[str, ...]) -> StepTime:
        """The phases of each part on one rank, and their sums, with exchanges that belong to no part."""
        timed = {part: {phase: self._phase(shape, part, phase) for phase in phases} for part in set(shape.timed_parts)}
        layers = tuple(timed[part] for part in shape.timed_parts)
        sums = {phase: _summed(layer[phase] for layer in layers) for phase in phases}
        return StepTime(layers, {phase: self._with_model_exchanges(shape, phase, sums[phase]) for phase in phases})

    def _with_model_exchanges(self, shape: Shape, phase: str, span: PhaseTime) -> PhaseTime:
        """Weights are gathered while the layer before computes, and gradients reduced while the next one does: all but
        the first or last. What the stages of a pipeline send each other is not here.
        """
        exchanges = (*shape.model_exchanges, *(shape.copies_exchanges if phase == "sync" else ()))
        times = [
            self.collective(e.op, e.ranks, e.words * self.word_bytes, e.stride)
            for e in exchanges
            if e.phase == phase and e.op not in ("send", "broadcast")
        ]
        covered = min(self._overlap * sum(times[1:]), span.compute) if phase != "sync" else 0.0
        return span._replace(exposed=span.exposed + sum(times) - covered, hidden=span.hidden + covered)

    def _pipeline(self, stage: Stage, kinds: list[tuple[Shape, int]], phases: tuple[str, ...]) -> StepTime:
        """A step of 1F1B. Times are means over stages; a stage is idle while it waits for others to compute."""
        count, stages = stage.micro_batches, stage.stages
        timed = [(self._rank(kind, phases), like // stage.ranks) for kind, like in kinds]
        steps = [step for step, like in timed for _ in range(like)]  # of each stage
        passes = [phase for phase in phases if phase in STREAMED]
        cycles = [sum(step.phases[phase].total for phase in passes) / count for step in steps]
        exchanges = [e for kind, _ in kinds for e in kind.model_exchanges]
        sizes = {e.op: e.contribution(self.word_bytes) for e in exchanges}
        sent = (count + stages - 1) * (stages - 1) / stages
        sent *= self.collective("send", stages, sizes["send"], stage.ranks)
        if "broadcast" in sizes:
            sent += self.collective("broadcast", stages, sizes["broadcast"], stage.ranks)
        mean = {}
        for phase in phases:
            span = PhaseTime(*(seconds / stages for seconds in _summed(step.phases[phase] for step in steps)))
            mean[phase] = span._replace(exposed=span.exposed + sent) if phase in passes else span
        total = sum(cycles) + (count - 1) * max(cycles) + len(passes) * sent
        total += max(sum(step.phases[phase].total for phase in phases if phase not in passes) for step in steps)
        idle = max(0.0, total - sum(span.total for span in mean.values()))
        return StepTime(steps[0].layers, mean, idle)

    def _phase(self, shape: Shape, layer: LayerCost, phase: str) -> PhaseTime:
        if phase == "sync":  # belongs to no part
            return PhaseTime()
        if phase == "update":
            states = OPTIMIZER_STATES[shape.optimizer]  # parameter and gradient are read, the parameter is written
            return PhaseTime(compute=self.elementwise(sum(layer.parameters) * (3 + 2 * states)))
        return self.layer(layer, phase)

    def _joules(self, step: StepTime, devices: int) -> float | None:
        """Of all ranks of all data-parallel copies."""
        busy, blocked, idle = self.profile.compute_watts, self.profile.communication_watts, self.profile.idle_watts
        if busy is None or blocked is None or idle is None:
            return None
        return devices * (busy.value * step.compute + blocked.value * step.exposed + idle.value * step.idle)


def _tier(op: Op, ranks: int, contribution: float, latency: float, seconds_per_byte: float, burst: float) -> float:
    """The cheaper way on one level of the network: ring or tree, in pairs or through others."""
    if ranks == 1:
        return 0.0
    height = (ranks - 1).bit_length()  # ceil(log2 R)
    ways: list[tuple[int, float]] = [(ranks - 1, ranks - 1), (2 * height, 2 * ranks - 1)]  # latencies, contributions
    if op in ("send", "broadcast"):
        ways = [(1, 1) if op == "send" else (height, height)]
    elif op == "all_reduce":
        ways = [(2 * (ranks - 1), 2 * (ranks - 1) / ranks), (2 * height, 2)]
    elif op == "all_to_all":
        ways = [(ranks - 1, ranks - 1), (height, height * ranks / 2)]
    return min(hops * latency + max(0.0, sent * contribution - burst) * seconds_per_byte for hops, sent in ways)
