"""Generation: the prompt once (prefill), then token by token (decode), with a cache that stays on its rank.

Every rank computes the logits of the whole vocabulary, whose parts are exchanged bit for bit, and chooses the token
itself: nobody waits to be told.
"""

import hashlib
import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from phantom_parallel.distributed.objects import check_agreement
from phantom_parallel.energy.meter import synchronize
from phantom_parallel.energy.time_split import TimeSplitRecorder
from phantom_parallel.families.gpt.config import GPTConfig
from phantom_parallel.families.gpt.model import GPT
from phantom_parallel.infer.measure import Turn
from phantom_parallel.infer.sampling import Sampler, Sampling
from phantom_parallel.nn.attention import Cache
from phantom_parallel.nn.sharded import to_local
from phantom_parallel.utils.layout import positive


class Timings(NamedTuple):
    """Seconds on this rank: until the first token, and for each one after it."""

    prefill: float
    decode: list[float]


@dataclass(frozen=True)
class Generation:
    """Tokens that follow the prompt, the same on every rank.

    ``tokens`` is (batch, generated). ``lengths`` says how many count of each row: a row that has come to a token to
    stop at, which counts, repeats it until the others are done.
    """

    tokens: Tensor
    lengths: list[int]
    timings: Timings


def generate(
    model: GPT,
    prompt_tokens: Tensor,
    *,
    tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: Collection[int] | None = None,
    on_token: Callable[[Tensor], None] | None = None,
) -> Generation:
    """Go on from a prompt; every rank of the model's mesh calls this with the same arguments.

    Args:
        prompt_tokens: (batch, length), at least one of each, whole on every rank.
        tokens: how many to generate; with the prompt, at most the model's context.
        temperature: as for `Sampling`.
        top_k: as for `Sampling`.
        top_p: as for `Sampling`.
        seed: as for `Sampling`. Draws are the same on any number of ranks.
        stop: tokens that end a row.
        on_token: told of each (batch,) of tokens as it comes; its time is not counted. It may be given on some ranks
            only.

    Example::

        prompt = torch.tensor([list(b"def main(")])
        text = bytes(generate(model, prompt, tokens=64).tokens[0].tolist())
    """
    sampling = Sampling(temperature, top_k, top_p, seed)
    check_request(model.config, prompt_tokens, tokens, sampling)
    ends = sorted(set(stop or ()))
    if ends and not 0 <= ends[0] <= ends[-1] < model.config.vocab:
        raise ValueError(f"tokens to stop at must lie from 0 to {model.config.vocab - 1}, got {ends}")
    agree_on_request(model, prompt_tokens, tokens=tokens, stop=ends, **asdict(sampling))
    with torch.no_grad():
        cache = model.new_cache(prompt_tokens.shape[0], prompt_tokens.shape[1] + tokens)
        return _generation(*run(model, prompt_tokens, tokens, sampling, cache, ends=ends, on_token=on_token), ends)


def _generation(chosen: Tensor, turns: list[Turn], ends: list[int]) -> Generation:
    ended = torch.isin(chosen.cpu(), torch.tensor(ends, dtype=chosen.dtype))
    lengths = [int(row.int().argmax()) + 1 if row.any() else len(row) for row in ended]
    return Generation(chosen, lengths, Timings(turns[0].seconds, [turn.seconds for turn in turns[1:]]))


def check_request(config: GPTConfig, prompt: Tensor, tokens: int, sampling: Sampling) -> None:
    """Whether a model can go on from this prompt for so many tokens."""
    positive(tokens=tokens)
    if prompt.dim() != 2 or prompt.is_floating_point() or prompt.dtype == torch.bool:
        raise ValueError(f"a prompt must be (batch, length) whole numbers, got {prompt.dtype} {tuple(prompt.shape)}")
    if 0 in prompt.shape:
        raise ValueError(f"the prompt is empty, of shape {tuple(prompt.shape)}: give at least one token")
    check_room(config, prompt.shape[1], tokens)
    sampling.check_vocabulary(config.vocab)


def check_room(config: GPTConfig, length: int, tokens: int) -> None:
    """Whether a prompt and what follows it fit into what the model can see."""
    room = config.context - length
    if room < 1:
        raise ValueError(
            f"a prompt of {length} tokens leaves no room in the model's context of {config.context}: "
            f"give at most {config.context - 1}"
        )
    if tokens > room:
        raise ValueError(
            f"a prompt of {length} tokens and {tokens} more do not fit into the model's context of {config.context}: "
            f"generate at most {room}, or shorten the prompt"
        )


def agree_on_request(model: GPT, prompt: Tensor, **settings: object) -> None:
    """An error where the ranks were not given the same."""
    digest = hashlib.sha256(prompt.long().cpu().numpy().tobytes()).hexdigest()[:16]
    told = {"prompt": f"{tuple(prompt.shape)} {digest}"} | {name: str(value) for name, value in settings.items()}
    check_agreement("what to generate", told, model.mesh)


def run(
    model: GPT,
    prompt: Tensor,
    tokens: int,
    sampling: Sampling,
    cache: Cache,
    *,
    ends: Collection[int] = (),
    clock: TimeSplitRecorder | None = None,
    on_token: Callable[[Tensor], None] | None = None,
) -> tuple[Tensor, list[Turn]]:
    """Generate with a cache that is filled anew: (batch, generated) tokens, and this rank's seconds of each step.

    For callers who have checked what they ask for, under ``torch.no_grad``: in inference mode DTensor cuts a Megatron
    pair worse. A clock that runs tells how long this rank was blocked in exchanges.
    """
    device = to_local(model.embedding.weight).device
    sampler, stops = Sampler(sampling), torch.tensor(sorted(ends), device=device)
    feed, cache.position = prompt.to(device, torch.long), 0
    chosen: list[Tensor] = []
    turns: list[Turn] = []
    done = torch.zeros(prompt.shape[0], dtype=torch.bool, device=device)
    before = None if clock is None else clock.totals()
    for index in range(tokens):
        started = time.perf_counter()
        with nullcontext() if clock is None else clock.step():
            logits = model.logits(feed, cache, last=True)[:, -1]  # (batch, vocab)
            token = sampler(logits)
            if ends and chosen:
                token = torch.where(done, chosen[-1], token)
            synchronize(device)
        seconds, blocked = time.perf_counter() - started, 0.0
        if clock is not None and before is not None:
            now = clock.totals()
            blocked, before = now.since(before).blocked_seconds, now
        if index == 0 and not bool(logits.isfinite().all()):
            raise ValueError("the model's logits are not finite numbers: its training may have diverged")
        turns.append(Turn(seconds, blocked))
        chosen.append(token)
        if on_token is not None:
            on_token(token)
        if ends:
            done |= torch.isin(token, stops)
            if bool(done.all()):
                break
        feed = token[:, None]
    return torch.stack(chosen, 1), turns
