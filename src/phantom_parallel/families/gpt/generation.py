"""Generation: the whole prompt at once (prefill), then token by token (decode), with a cache that stays on its rank.

Every rank holds the same logits of the whole vocabulary, since their parts are gathered bit for bit, and selects the
token itself, without another collective.
"""

import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from phantom_parallel.distributed.objects import check_agreement
from phantom_parallel.distributed.process_group import ParallelContext
from phantom_parallel.energy.meter import EnergyMeter, synchronize
from phantom_parallel.energy.power import PowerProfile
from phantom_parallel.families.gpt.config import GPTConfig, GPTTrainConfig
from phantom_parallel.families.gpt.model import GPT
from phantom_parallel.infer.measure import Call, Cost, measure_calls
from phantom_parallel.infer.sampling import Sampler, Sampling
from phantom_parallel.nn.attention import Cache
from phantom_parallel.nn.sharded import to_local
from phantom_parallel.train.config import TrainConfig
from phantom_parallel.utils.layout import positive

# Called with the (batch,) tokens of a step; may return the rows that end with them, (batch,) of bool.
OnToken = Callable[[Tensor], Sequence[bool] | None]


@dataclass(frozen=True)
class Generation:
    """Generated tokens, the same on every rank. A row that has reached a stop token repeats it until all rows have."""

    tokens: Tensor  # (batch, generated)
    lengths: list[int]  # valid tokens of each row, with a stop token
    prefill_seconds: float  # until the first token, on this rank
    decode_seconds: list[float]  # of each token after it


class Prompts(NamedTuple):
    """Prompts of a batch, (batch, length), padded on the left to the length of the longest.

    ``starts`` is the position of each row's first token, (batch,); None if no row is padded.
    """

    tokens: Tensor
    starts: Tensor | None = None

    @classmethod
    def of(cls, prompts: Tensor | Sequence[Tensor]) -> "Prompts":
        """Pad prompts of unequal length; a (batch, length) tensor is taken as it is."""
        if isinstance(prompts, Tensor):
            return cls(prompts)
        lengths = [len(prompt) for prompt in prompts]
        if not lengths or min(lengths) == 0:
            raise ValueError(f"each prompt must have at least one token, got the lengths {lengths}")
        starts = max(lengths) - torch.tensor(lengths)
        tokens = torch.stack([F.pad(prompt, (int(start), 0)) for prompt, start in zip(prompts, starts, strict=True)])
        return cls(tokens, starts if bool(starts.any()) else None)

    @property
    def token_count(self) -> int:
        """Tokens of all rows, without padding."""
        return self.tokens.numel() - (0 if self.starts is None else int(self.starts.sum()))

    def new_cache(self, model: GPT, tokens: int) -> Cache:
        """A cache for the prompts and ``tokens`` more of each."""
        cache = model.new_cache(self.tokens.shape[0], self.tokens.shape[1] + tokens)
        cache.starts = None if self.starts is None else self.starts.to(cache.keys.device)
        return cache


@torch.no_grad()  # in inference mode DTensor chooses slower layouts for a Megatron pair
def generate(
    model: GPT,
    prompt_tokens: Tensor | Sequence[Tensor],
    *,
    tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: Collection[int] | None = None,
    on_token: OnToken | None = None,
) -> Generation:
    """Generate tokens from a prompt. Every rank of the model's mesh calls this with the same arguments.

    Args:
        model: The model.
        prompt_tokens: (batch, length), the same on every rank, with at least one row and one token; or a list of
            (length,), which may differ in length: a row computes what it would by itself.
        tokens: Maximum number of tokens to generate; with the longest prompt, at most the model's context.
        temperature, top_k, top_p, seed: As for `Sampling`. Samples are the same on any number of ranks.
        stop: Tokens that end a row.
        on_token: Called with each (batch,) of tokens when it is generated. Its time is not counted. It may return which
            rows end with it, and must then do so on every rank alike.

    Raises:
        ValueError: If the arguments do not fit the model, or its logits are not finite.
        RanksDisagree: If ranks differ in their arguments.

    Example::

        prompt = torch.tensor([list(b"def main(")])
        text = bytes(generate(model, prompt, tokens=64).tokens[0].tolist())
    """
    sampling, ends = Sampling(temperature, top_k, top_p, seed), sorted(set(stop or ()))
    prompts = Prompts.of(prompt_tokens)
    _check_agreement(model, prompts, tokens=tokens, stop=ends, **asdict(sampling))  # first: no rank waits for another
    check_request(model.config, prompts, tokens, sampling)
    if ends and not 0 <= ends[0] <= ends[-1] < model.config.vocab:
        raise ValueError(f"stop must be tokens from 0 to {model.config.vocab - 1}, got {ends}")
    device = to_local(model.embedding.weight).device
    cache, sampler, stops = prompts.new_cache(model, tokens), Sampler(sampling), torch.tensor(ends, device=device)
    inputs = prompts.tokens.to(device, torch.long)
    selected: list[Tensor] = []
    seconds: list[float] = []
    done = torch.zeros(len(inputs), dtype=torch.bool, device=device)
    lengths = torch.zeros(len(inputs), dtype=torch.long, device=device)
    while len(selected) < tokens and not (selected and bool(done.all())):
        started = time.perf_counter()
        logits = model.logits(inputs, cache, last=True)[:, -1]  # (batch, vocab)
        token = sampler(logits)
        if selected:
            token = torch.where(done, selected[-1], token)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
        if not selected and not bool(logits.isfinite().all()):
            raise ValueError("the model's logits are not finite: its training may have diverged")
        selected.append(token)
        lengths += ~done
        done |= torch.isin(token, stops)
        if on_token is not None and (ended := on_token(token)) is not None:
            done |= torch.tensor(ended, device=device)
        inputs = token[:, None]
    return Generation(torch.stack(selected, 1), lengths.tolist(), seconds[0], seconds[1:])


def check_request(config: GPTConfig, prompts: Prompts, tokens: int, sampling: Sampling) -> None:
    """Raise ValueError if a model cannot generate ``tokens`` tokens from these prompts."""
    positive(tokens=tokens)
    shape, dtype = tuple(prompts.tokens.shape), prompts.tokens.dtype
    if len(shape) != 2 or 0 in shape or dtype.is_floating_point:
        raise ValueError(f"prompts must be (batch, length) whole numbers, at least one, got {dtype} {shape}")
    check_room(config, shape[1], tokens)
    low, high = (int(token) for token in prompts.tokens.aminmax())
    if low < 0 or high >= config.vocab:  # an accelerator would abort, or compute something else
        raise ValueError(f"tokens must lie from 0 to {config.vocab - 1}, got {low if low < 0 else high}")
    sampling.check_vocabulary(config.vocab)


def check_room(config: GPTConfig, length: int, tokens: int) -> None:
    """Raise ValueError if a prompt of ``length`` tokens and ``tokens`` more do not fit into the model's context."""
    room = config.context - length
    if tokens > room:
        advice = f"generate at most {room}, or shorten the prompt" if room > 0 else f"give at most {config.context - 1}"
        raise ValueError(
            f"a prompt of {length} tokens and {tokens} more do not fit into the model's context of {config.context}: "
            f"{advice}"
        )


def _check_agreement(model: GPT, prompts: Prompts, **settings: Any) -> None:
    """Raise RanksDisagree if ranks differ in the prompts or the settings."""
    digest = hashlib.sha256(prompts.tokens.long().cpu().numpy().tobytes()).hexdigest()[:16]
    starts = "" if prompts.starts is None else f" {prompts.starts.tolist()}"
    request = {"prompt": f"{tuple(prompts.tokens.shape)} {digest}{starts}"}
    check_agreement("what to generate", request | {name: str(value) for name, value in settings.items()}, model.mesh)


def measure_generation(
    models: Mapping[str, GPT],
    prompt: Tensor | Sequence[Tensor],
    tokens: int,
    *,
    turns: int = 20,
    sampling: Sampling | None = None,
    profile: PowerProfile | None = None,
    meter: EnergyMeter | None = None,
    report: Callable[[int], None] | None = None,
) -> dict[str, dict[str, Cost]]:
    """Measure the cost of a token by models on the same ranks, separately for prefill and decode. Every rank of their
    mesh calls this.

    Args:
        models: The models by name, all on the same ranks and device.
        prompt: (batch, length) tokens, or a list of (length,). A prefill is the whole prompt and the selection of the
            first token.
        tokens: Number of tokens that follow. Decode is one step in the middle of them, as attention covers more
            positions the longer the text is; there is none for one token, which prefill produces.
        sampling: How tokens are selected, which is part of the cost; by default the most likely one.
        turns, profile, meter, report: As for `measure_calls`.

    Returns:
        For each model, the cost of ``prefill`` and of ``decode``, for one token of one row.
    """
    sampling = sampling or Sampling()
    prompts = Prompts.of(prompt)
    first = next(iter(models.values()))
    _check_agreement(first, prompts, tokens=tokens, models=list(models), profile=profile, **asdict(sampling))
    device = to_local(first.embedding.weight).device
    batch, length = prompts.tokens.shape
    calls: dict[str, Call] = {}
    for name, model in models.items():
        check_request(model.config, prompts, tokens, sampling)
        cache, inputs = prompts.new_cache(model, tokens), prompts.tokens.to(device, torch.long)
        calls[f"{name} prefill"] = Call(_step(model, inputs, cache, 0, Sampler(sampling)), prompts.token_count)
        if tokens > 1:
            middle = length + (tokens - 2) // 2
            calls[f"{name} decode"] = Call(_step(model, inputs[:, -1:], cache, middle, Sampler(sampling)), batch)
    costs = measure_calls(calls, first.mesh, device, turns=turns, profile=profile, meter=meter, report=report)
    phases = ("prefill", "decode")
    return {name: {phase: costs[key] for phase in phases if (key := f"{name} {phase}") in costs} for name in models}


def _step(model: GPT, inputs: Tensor, cache: Cache, position: int, sampler: Sampler) -> Callable[[], None]:
    """Return a function that computes the next token at ``position`` of the cache, and waits for it."""

    def step() -> None:
        cache.position = position
        sampler(model.logits(inputs, cache, last=True)[:, -1])
        synchronize(inputs.device)

    return step


def measure_inference(
    configs: Mapping[str, TrainConfig], context: ParallelContext, batch: int, *, turns: int, power: PowerProfile
) -> dict[str, dict[str, Any]]:
    """Decoding by untrained models of each strategy behind a prompt of half the context, for a comparison. A sample is
    one token of one sequence. Returns fields of `study.results.InferenceResult`.
    """
    trainings = {name: cast(GPTTrainConfig, config) for name, config in configs.items()}
    where: dict[str, Any] = {"mesh": context.tp, "device": context.device}
    models = {name: GPT(config.model, **where, wire=config.wire) for name, config in trainings.items()}
    half = min(config.context for config in trainings.values()) // 2
    prompt = torch.zeros(batch, half, dtype=torch.int64, device=context.device)
    costs = measure_generation(models, prompt, half, turns=max(2, turns), profile=power)
    return {
        name: phases["decode"].inference_result()
        | {"batch": batch, "ranks": configs[name].ranks, "turns": turns}
        | {"prompt": half, "prefill_seconds": phases["prefill"].seconds}
        | {"parameters": sum(parameter.numel() for parameter in models[name].parameters())}
        for name, phases in costs.items()
    }
