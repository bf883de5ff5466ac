"""What generation costs, prefill and decode apart: models on the same ranks, timed by turns.

    prefill     from the prompt to the first token; in a turn, the slowest rank's
    decode      from a token to the next, as rank 0 has them, over all steps of all turns
    counts      by the ledger, in a pass that is not timed; for decode, at the position in the middle
    energy      as for `measure`: by sensors where there are some, else modelled, else unavailable

A turn is a whole generation. The order of models alternates, so that what drifts on a machine drifts for all of them.
"""

import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phantom_parallel.cost.ledger import Ledger
from phantom_parallel.distributed.objects import all_gather_objects, barrier
from phantom_parallel.energy.meter import EnergyMeter, synchronize
from phantom_parallel.energy.power_profile import PowerProfile
from phantom_parallel.energy.results import Provenance
from phantom_parallel.energy.time_split import TimeSplitRecorder, timer_for
from phantom_parallel.families.gpt.generation import agree_on_request, check_request, run
from phantom_parallel.families.gpt.model import GPT
from phantom_parallel.infer.generation import GenerationCost, PhaseCost
from phantom_parallel.infer.measure import Turn, modelled_joules, p95, place_of, sense
from phantom_parallel.infer.sampling import Sampler, Sampling
from phantom_parallel.nn.attention import Cache
from phantom_parallel.ops.collectives import rank_group
from phantom_parallel.utils.layout import positive

WARM_UP = 4  # tokens


class _Taken(NamedTuple):
    """One rank's turn: prefill, and every step of decode."""

    prefill: Turn
    decode: list[Turn]

    @property
    def decoding(self) -> Turn:
        return Turn(sum(step.seconds for step in self.decode), sum(step.blocked for step in self.decode))


class _Counts(NamedTuple):
    flops: int
    moved: int


@torch.no_grad()
def measure_generation(
    models: Mapping[str, GPT],
    prompt: Tensor,
    tokens: int,
    turns: int = 5,
    *,
    sampling: Sampling | None = None,
    profile: PowerProfile | None = None,
    meter: EnergyMeter | None = None,
    on_token: Callable[[Tensor], None] | None = None,
    report: Callable[[int], None] | None = None,
) -> dict[str, GenerationCost]:
    """Generate ``tokens`` tokens from (batch, length) tokens of a prompt; every rank of the models' mesh calls this.

    Args:
        models: by name, all on the same ranks and device.
        turns: how often each model generates, after a warm-up.
        sampling: how tokens are chosen, which counts; by default the likeliest.
        profile: watts for modelled energy where there are no sensors. Without it, and them, energy is unavailable.
        meter: of the sensors; by default one of all that this machine has.
        on_token: told of the tokens of the first model's first turn as they come.
        report: told how many turns are done.
    """
    sampling = sampling or Sampling()
    positive(turns=turns)
    mesh, device = place_of(models)
    for model in models.values():
        check_request(model.config, prompt, tokens, sampling)
    first = next(iter(models.values()))
    named = {name: model.config for name, model in models.items()}
    agree_on_request(first, prompt, tokens=tokens, turns=turns, models=named, profile=profile, sampling=sampling)
    group = None if mesh is None else mesh.get_group()
    prompt = prompt.to(device, torch.long)
    runs = {name: _Run(model, prompt, tokens, sampling) for name, model in models.items()}
    counts = {name: all_gather_objects(one.count(), group) for name, one in runs.items()}
    clock = TimeSplitRecorder(device.type, timer_for(device))
    clock.start()
    try:
        told = all_gather_objects(_take_turns(runs, turns, clock, group, on_token, report), group)
    finally:
        clock.stop()
    costs = {name: _Cost(runs[name], [one[name] for one in told], counts[name]) for name in models}
    steps = {f"{name} {phase}": run for name, one in runs.items() for phase, run in one.phases().items()}
    taken = {f"{name} {phase}": seconds for name, one in costs.items() for phase, seconds in one.latencies().items()}
    sensed = sense(steps, taken, meter or EnergyMeter(group, device=device), group)
    return {
        name: one.result(profile, {phase: sensed.get(f"{name} {phase}") for phase in ("prefill", "decode")})
        for name, one in costs.items()
    }


class _Run:
    """One model, its cache and what it is asked for."""

    def __init__(self, model: GPT, prompt: Tensor, tokens: int, sampling: Sampling) -> None:
        self.model, self.prompt, self.tokens, self.sampling = model, prompt, tokens, sampling
        self.cache: Cache = model.new_cache(prompt.shape[0], prompt.shape[1] + tokens)

    def generate(self, clock: TimeSplitRecorder, on_token: Callable[[Tensor], None] | None) -> _Taken:
        _, turns = run(self.model, self.prompt, self.tokens, self.sampling, self.cache, clock=clock, on_token=on_token)
        return _Taken(turns[0], turns[1:])

    def phases(self) -> dict[str, Callable[[], None]]:
        """One prefill, and one step of decode in the middle, each to its very end."""
        sampler, length = Sampler(self.sampling), self.prompt.shape[1]

        def step(feed: Tensor, position: int) -> None:
            self.cache.position = position
            sampler(self.model.logits(feed, self.cache, last=True)[:, -1])
            synchronize(feed.device)

        found = {"prefill": lambda: step(self.prompt, 0)}
        if self.tokens > 1:
            found["decode"] = lambda: step(self.prompt[:, -1:], length + (self.tokens - 2) // 2)
        return found

    def count(self) -> dict[str, _Counts]:
        """What this rank computes and sends in each phase. Afterwards the model is warm."""
        found = {}
        for phase, step in self.phases().items():
            with Ledger() as ledger:
                step()
            found[phase] = _Counts(ledger.flops, ledger.moved_bytes)
        run(self.model, self.prompt, min(self.tokens, WARM_UP), self.sampling, self.cache)
        return found


def _take_turns(
    runs: Mapping[str, _Run],
    turns: int,
    clock: TimeSplitRecorder,
    group: dist.ProcessGroup | None,
    on_token: Callable[[Tensor], None] | None,
    report: Callable[[int], None] | None,
) -> dict[str, list[_Taken]]:
    """This rank's turns of each model."""
    taken: dict[str, list[_Taken]] = {name: [] for name in runs}
    for turn in range(turns):
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            barrier(group)
            taken[name].append(runs[name].generate(clock, on_token))
            on_token = None  # once is enough
        if report is not None:
            report(turn + 1)
    return taken


class _Cost:
    """What all ranks say of one model, by rank and turn."""

    def __init__(self, one: _Run, taken: list[list[_Taken]], counts: list[dict[str, _Counts]]) -> None:
        self.run, self.taken, self.counts = one, taken, counts

    def latencies(self) -> dict[str, list[float]]:
        together = zip(*self.taken, strict=True)
        return {
            "prefill": [max(one.prefill.seconds for one in turn) for turn in together],
            "decode": [step.seconds for one in self.taken[0] for step in one.decode],
        }

    def result(
        self, profile: PowerProfile | None, sensed: Mapping[str, tuple[float, Provenance] | None]
    ) -> GenerationCost:
        one, taken = self.run, self.taken
        batch, length = one.prompt.shape
        prefills = [[turn.prefill for turn in rank] for rank in taken]
        decodes = [[turn.decoding for turn in rank] for rank in taken]
        return GenerationCost(
            strategy=one.model.config.strategy,
            ranks=rank_group(one.model.mesh).size,
            batch=batch,
            prompt=length,
            tokens=one.tokens,
            turns=len(taken[0]),
            parameters=sum(parameter.numel() for parameter in one.model.parameters()),
            prefill=self._phase("prefill", prefills, 1, batch * length, profile, sensed["prefill"]),
            decode=None
            if one.tokens == 1
            else self._phase("decode", decodes, one.tokens - 1, batch, profile, sensed["decode"]),
        )

    def _phase(
        self,
        name: str,
        ranks: list[list[Turn]],
        steps: int,
        tokens: int,
        profile: PowerProfile | None,
        sensed: tuple[float, Provenance] | None,
    ) -> PhaseCost:
        """``steps`` are those of a turn, and ``tokens`` go through the model in each."""
        latencies = self.latencies()[name]
        joules, provenance = None, Provenance.UNAVAILABLE
        if sensed is not None:
            joules, provenance = sensed
        elif profile is not None:
            joules, provenance = modelled_joules(ranks, profile) / (steps * len(ranks[0])), Provenance.MODELLED
        every = [turn for rank in ranks for turn in rank]
        return PhaseCost(
            seconds=statistics.median(latencies),
            seconds_p95=p95(latencies),
            tokens_per_second=tokens / statistics.fmean(latencies),
            flops_per_token=sum(rank[name].flops for rank in self.counts) / tokens,
            bytes_per_token=sum(rank[name].moved for rank in self.counts) / tokens,
            joules_per_token=None if joules is None else joules / tokens,
            provenance=str(provenance),
            blocked_share=sum(turn.blocked for turn in every) / sum(turn.seconds for turn in every),
        )
