"""The cost of generation, separately for prefill and decode: models on the same ranks, timed in turns.

    prefill     from the prompt to the first token; in a turn, on the slowest rank
    decode      from one token to the next, on rank 0, over all steps of all turns
    counts      by the ledger, in a pass that is not timed; for decode, at the position in the middle
    energy      as for `measure`: by sensors if there are any, otherwise modelled, otherwise unavailable

A turn is a whole generation. The order of models alternates, so that drift of the machine affects all of them alike.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phantom_parallel.cost.ledger import Ledger
from phantom_parallel.distributed.objects import all_gather_objects, barrier
from phantom_parallel.energy.meter import EnergyMeter, synchronize
from phantom_parallel.energy.power import PowerProfile
from phantom_parallel.energy.results import Provenance
from phantom_parallel.energy.time_split import TimeSplitRecorder, timer_for
from phantom_parallel.families.gpt.generation import Prompts, agree_on_request, check_request, generate_tokens
from phantom_parallel.families.gpt.model import GPT
from phantom_parallel.infer.generation import GenerationCost, PhaseCost
from phantom_parallel.infer.measure import Turn, measure_joules, mesh_and_device, modelled_joules, p95
from phantom_parallel.infer.sampling import Sampler, Sampling
from phantom_parallel.nn.attention import Cache
from phantom_parallel.ops.collectives import rank_group
from phantom_parallel.utils.layout import positive

WARM_UP = 4  # tokens


class _Timed(NamedTuple):
    """One generation on one rank: prefill, and every step of decode."""

    prefill: Turn
    decode: list[Turn]

    @property
    def decoding(self) -> Turn:
        """All steps of decode together."""
        return Turn(sum(step.seconds for step in self.decode), sum(step.blocked for step in self.decode))


class _Counts(NamedTuple):
    """FLOPs and sent bytes of one rank."""

    flops: int
    moved: int


@torch.no_grad()
def measure_generation(
    models: Mapping[str, GPT],
    prompt: Tensor | Sequence[Tensor],
    tokens: int,
    turns: int = 5,
    *,
    sampling: Sampling | None = None,
    profile: PowerProfile | None = None,
    meter: EnergyMeter | None = None,
    on_token: Callable[[Tensor], None] | None = None,
    report: Callable[[int], None] | None = None,
) -> dict[str, GenerationCost]:
    """Generate with every model in turn, and measure its cost. Every rank of the models' mesh calls this.

    Args:
        models: The models by name, all on the same ranks and device.
        prompt: (batch, length) tokens, or a list of (length,).
        tokens: Number of tokens to generate.
        turns: Number of generations of each model, after a warm-up.
        sampling: How tokens are selected, which is part of the cost; by default the most likely one.
        profile: Watts of modelled energy if there are no sensors. Without both, energy is unavailable.
        meter: The energy meter; by default one with all sensors of this machine.
        on_token: Called with the tokens of the first model's first turn as they are generated.
        report: Called with the number of finished turns after each.
    """
    sampling = sampling or Sampling()
    positive(turns=turns)
    mesh, device = mesh_and_device(models)
    prompts = Prompts.of(prompt)
    for model in models.values():
        check_request(model.config, prompts.tokens, tokens, sampling)
    first = next(iter(models.values()))
    named = {name: model.config for name, model in models.items()}
    agree_on_request(first, prompts, tokens=tokens, turns=turns, models=named, profile=profile, sampling=sampling)
    group = None if mesh is None else mesh.get_group()
    prompts = prompts._replace(tokens=prompts.tokens.to(device, torch.long))
    runs = {name: _Run(model, prompts, tokens, sampling) for name, model in models.items()}
    counts = {name: all_gather_objects(run.count(), group) for name, run in runs.items()}
    clock = TimeSplitRecorder(device.type, timer_for(device))
    clock.start()
    try:
        gathered = all_gather_objects(_take_turns(runs, turns, clock, group, on_token, report), group)
    finally:
        clock.stop()
    costs = {name: _Cost(runs[name], [rank[name] for rank in gathered], counts[name]) for name in models}
    steps = {f"{name} {phase}": step for name, run in runs.items() for phase, step in run.phases().items()}
    latencies = {f"{name} {phase}": times for name, cost in costs.items() for phase, times in cost.latencies().items()}
    sensed = measure_joules(steps, latencies, meter or EnergyMeter(group, device=device), group)
    return {
        name: cost.result(profile, {phase: sensed.get(f"{name} {phase}") for phase in ("prefill", "decode")})
        for name, cost in costs.items()
    }


class _Run:
    """One model with its cache and its request."""

    def __init__(self, model: GPT, prompts: Prompts, tokens: int, sampling: Sampling) -> None:
        self.model, self.prompt, self.tokens, self.sampling = model, prompts.tokens, tokens, sampling
        self.cache: Cache = prompts.new_cache(model, tokens)
        self.prompt_tokens = prompts.token_count

    def generate(self, clock: TimeSplitRecorder, on_token: Callable[[Tensor], None] | None) -> _Timed:
        _, turns = generate_tokens(
            self.model, self.prompt, self.tokens, self.sampling, self.cache, clock=clock, on_token=on_token
        )
        return _Timed(turns[0], turns[1:])

    def phases(self) -> dict[str, Callable[[], None]]:
        """Return functions that run one prefill, and one step of decode in the middle, and wait for their results."""
        sampler, length = Sampler(self.sampling), self.prompt.shape[1]

        def step(inputs: Tensor, position: int) -> None:
            self.cache.position = position
            sampler(self.model.logits(inputs, self.cache, last=True)[:, -1])
            synchronize(inputs.device)

        phases = {"prefill": lambda: step(self.prompt, 0)}
        if self.tokens > 1:
            phases["decode"] = lambda: step(self.prompt[:, -1:], length + (self.tokens - 2) // 2)
        return phases

    def count(self) -> dict[str, _Counts]:
        """Count this rank's FLOPs and sent bytes in each phase, and warm the model up."""
        counts = {}
        for phase, step in self.phases().items():
            with Ledger() as ledger:
                step()
            counts[phase] = _Counts(ledger.flops, ledger.moved_bytes)
        generate_tokens(self.model, self.prompt, min(self.tokens, WARM_UP), self.sampling, self.cache)
        return counts


def _take_turns(
    runs: Mapping[str, _Run],
    turns: int,
    clock: TimeSplitRecorder,
    group: dist.ProcessGroup | None,
    on_token: Callable[[Tensor], None] | None,
    report: Callable[[int], None] | None,
) -> dict[str, list[_Timed]]:
    """Time this rank's turns of each model."""
    timed: dict[str, list[_Timed]] = {name: [] for name in runs}
    for turn in range(turns):
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            barrier(group)
            timed[name].append(runs[name].generate(clock, on_token))
            on_token = None  # for the first generation only
        if report is not None:
            report(turn + 1)
    return timed


class _Cost:
    """The measurements of one model, by rank and turn."""

    def __init__(self, run: _Run, timed: list[list[_Timed]], counts: list[dict[str, _Counts]]) -> None:
        self.run, self.timed, self.counts = run, timed, counts

    def latencies(self) -> dict[str, list[float]]:
        """Return the seconds of each prefill, and of each step of decode."""
        return {
            "prefill": [max(rank.prefill.seconds for rank in turn) for turn in zip(*self.timed, strict=True)],
            "decode": [step.seconds for turn in self.timed[0] for step in turn.decode],
        }

    def result(
        self, profile: PowerProfile | None, sensed: Mapping[str, tuple[float, Provenance] | None]
    ) -> GenerationCost:
        run, timed = self.run, self.timed
        batch, length = run.prompt.shape
        prefills = [[turn.prefill for turn in rank] for rank in timed]
        decodes = [[turn.decoding for turn in rank] for rank in timed]
        return GenerationCost(
            strategy=run.model.config.strategy,
            ranks=rank_group(run.model.mesh).size,
            batch=batch,
            prompt=length,
            tokens=run.tokens,
            turns=len(timed[0]),
            parameters=sum(parameter.numel() for parameter in run.model.parameters()),
            prefill=self._phase("prefill", prefills, 1, run.prompt_tokens, profile, sensed["prefill"]),
            decode=None
            if run.tokens == 1
            else self._phase("decode", decodes, run.tokens - 1, batch, profile, sensed["decode"]),
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
        """Return the cost of a phase with ``steps`` steps in a turn, of ``tokens`` tokens each."""
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
