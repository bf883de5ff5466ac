"""Generation: the whole prompt at once (prefill), then token by token (decode), with a cache that stays on its rank.

Every rank holds the same logits of the whole vocabulary, since their parts are exchanged bit for bit, and selects the
token itself, without another exchange.
"""

import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
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
    """Generated tokens, the same on every rank.

    Args:
        tokens: (batch, generated).
        lengths: Number of valid tokens of each row. A row that has reached a stop token, which counts, repeats it until
            all rows have.
        timings: Seconds on this rank.
    """

    tokens: Tensor
    lengths: list[int]
    timings: Timings


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
        for prompt in prompts:
            if prompt.dim() != 1 or prompt.is_floating_point() or prompt.dtype == torch.bool:
                raise ValueError(
                    f"each prompt of a list must be (length,) whole numbers, got {prompt.dtype} {tuple(prompt.shape)}"
                )
        lengths = [len(prompt) for prompt in prompts]
        if not lengths or min(lengths) == 0:
            raise ValueError(f"a prompt is empty, of the lengths {lengths}: give at least one token each")
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
    on_token: Callable[[Tensor], None] | None = None,
) -> Generation:
    """Generate tokens from a prompt. Every rank of the model's mesh calls this with the same arguments.

    Args:
        model: The model.
        prompt_tokens: (batch, length), the same on every rank, with at least one row and one token; or a list of
            (length,), which may differ in length: a row computes what it would by itself.
        tokens: Number of tokens to generate; with the longest prompt, at most the model's context.
        temperature: As for `Sampling`.
        top_k: As for `Sampling`.
        top_p: As for `Sampling`.
        seed: As for `Sampling`. Samples are the same on any number of ranks.
        stop: Tokens that end a row.
        on_token: Called with each (batch,) of tokens when it is generated. Its time is not counted. Some ranks may omit
            it.

    Raises:
        ValueError: If the arguments do not fit the model, or its logits are not finite.
        RanksDisagree: If ranks differ in their arguments.

    Example::

        prompt = torch.tensor([list(b"def main(")])
        text = bytes(generate(model, prompt, tokens=64).tokens[0].tolist())
    """
    sampling = Sampling(temperature, top_k, top_p, seed)
    prompts = Prompts.of(prompt_tokens)
    check_request(model.config, prompts.tokens, tokens, sampling)
    ends = sorted(set(stop or ()))
    if ends and not 0 <= ends[0] <= ends[-1] < model.config.vocab:
        raise ValueError(f"tokens to stop at must be from 0 to {model.config.vocab - 1}, got {ends}")
    agree_on_request(model, prompts, tokens=tokens, stop=ends, **asdict(sampling))
    with torch.no_grad():
        cache = prompts.new_cache(model, tokens)
        return _generation(
            *generate_tokens(model, prompts.tokens, tokens, sampling, cache, ends=ends, on_token=on_token), ends
        )


def _generation(selected: Tensor, turns: list[Turn], ends: list[int]) -> Generation:
    ended = torch.isin(selected.cpu(), torch.tensor(ends, dtype=selected.dtype))
    lengths = [int(row.int().argmax()) + 1 if row.any() else len(row) for row in ended]
    return Generation(selected, lengths, Timings(turns[0].seconds, [turn.seconds for turn in turns[1:]]))


def check_request(config: GPTConfig, prompt: Tensor, tokens: int, sampling: Sampling) -> None:
    """Raise ValueError if a model cannot generate ``tokens`` tokens from this prompt."""
    positive(tokens=tokens)
    if prompt.dim() != 2 or prompt.is_floating_point() or prompt.dtype == torch.bool:
        raise ValueError(f"a prompt must be (batch, length) whole numbers, got {prompt.dtype} {tuple(prompt.shape)}")
    if 0 in prompt.shape:
        raise ValueError(f"the prompt is empty, of shape {tuple(prompt.shape)}: give at least one token")
    check_room(config, prompt.shape[1], tokens)
    sampling.check_vocabulary(config.vocab)


def check_room(config: GPTConfig, length: int, tokens: int) -> None:
    """Raise ValueError if a prompt of ``length`` tokens and ``tokens`` more do not fit into the model's context."""
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


def agree_on_request(model: GPT, prompts: Prompts, **settings: object) -> None:
    """Raise RanksDisagree if ranks differ in the prompts or the settings."""
    digest = hashlib.sha256(prompts.tokens.long().cpu().numpy().tobytes()).hexdigest()[:16]
    starts = "" if prompts.starts is None else f" {prompts.starts.tolist()}"
    request = {"prompt": f"{tuple(prompts.tokens.shape)} {digest}{starts}"} | {
        name: str(value) for name, value in settings.items()
    }
    check_agreement("what to generate", request, model.mesh)


def generate_tokens(
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
    """Generate tokens, with arguments that were checked, under ``torch.no_grad``: in inference mode DTensor chooses
    slower layouts for a Megatron pair.

    Args:
        model: The model.
        prompt: (batch, length) tokens.
        tokens: Number of tokens to generate.
        sampling: How tokens are selected.
        cache: The cache, which is filled anew; it knows where rows start.
        ends: Tokens that end a row.
        clock: A running recorder of the time that this rank is blocked in exchanges.
        on_token: As for `generate`.

    Returns:
        (batch, generated) tokens, and this rank's seconds of each step.
    """
    device = to_local(model.embedding.weight).device
    sampler, stops = Sampler(sampling), torch.tensor(sorted(ends), device=device)
    inputs, cache.position = prompt.to(device, torch.long), 0
    selected: list[Tensor] = []
    turns: list[Turn] = []
    done = torch.zeros(prompt.shape[0], dtype=torch.bool, device=device)
    before = None if clock is None else clock.totals()
    for index in range(tokens):
        started = time.perf_counter()
        with nullcontext() if clock is None else clock.step():
            logits = model.logits(inputs, cache, last=True)[:, -1]  # (batch, vocab)
            token = sampler(logits)
            if ends and selected:
                token = torch.where(done, selected[-1], token)
            synchronize(device)
        seconds, blocked = time.perf_counter() - started, 0.0
        if clock is not None and before is not None:
            now = clock.totals()
            blocked, before = now.since(before).blocked_seconds, now
        if index == 0 and not bool(logits.isfinite().all()):
            raise ValueError("the model's logits are not finite: its training may have diverged")
        turns.append(Turn(seconds, blocked))
        selected.append(token)
        if on_token is not None:
            on_token(token)
        if ends:
            done |= torch.isin(token, stops)
            if bool(done.all()):
                break
        inputs = token[:, None]
    return torch.stack(selected, 1), turns
