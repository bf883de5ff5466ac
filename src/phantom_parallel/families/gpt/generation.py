"""Generation, and ``phantom generate``: text first, its cost on request, on local or external ranks.

The whole prompt runs at once (prefill), then token by token (decode), with a cache that stays on its rank. Every rank
holds the same logits of the whole vocabulary, since their parts are gathered bit for bit, and selects the token itself,
without another collective. Stages of a pipeline pass the rows on together, and the last one broadcasts the tokens.

The launcher turns prompts into requests, each a dictionary of plain data. Every rank serves one request after the other
(`_serve`), and rank 0 reports text to the launcher as it grows. In a conversation each rank reads requests from a named
pipe of its own, so that none waits in a collective while the user types.
"""

import hashlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel.checkpoint.model import load_model
from phantom_parallel.distributed.launch import check_memory, launch, launch_device_type
from phantom_parallel.distributed.launchers import launched_externally
from phantom_parallel.distributed.objects import check_agreement
from phantom_parallel.distributed.process_group import ParallelContext
from phantom_parallel.energy.meter import synchronize
from phantom_parallel.energy.power import PowerProfile
from phantom_parallel.families.gpt.config import GPTConfig, GPTTrainConfig
from phantom_parallel.families.gpt.model import GPT, check_tokens, next_token
from phantom_parallel.families.gpt.text import RowText, encode_prompt, find_tokenizer, stop_tokens
from phantom_parallel.infer.measure import Call, Cost, default_power_profile, measure_calls
from phantom_parallel.infer.predict import check_model, strategy_on
from phantom_parallel.infer.sampling import GenerateConfig, Sampler, Sampling
from phantom_parallel.nn.attention import Cache
from phantom_parallel.nn.sharded import to_local
from phantom_parallel.utils.layout import positive
from phantom_parallel.utils.parsing import printable
from phantom_parallel.utils.progress import ProgressDisplay

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
    """Prompts of a batch, padded on the left to the length of the longest."""

    tokens: Tensor  # (batch, length)
    starts: Tensor | None = None  # position of each row's first token, (batch,); None if no row is padded

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
        prompt_tokens: (batch, length), or a list of (length,), which may differ in length: a row computes what it would
            by itself.
        tokens: Maximum number of tokens to generate; with the longest prompt, at most the model's context.
        temperature, top_k, top_p, seed: As for `Sampling`. Samples are the same on any number of ranks.
        stop: Tokens that end a row.
        on_token: Called with each (batch,) of tokens when it is generated. Its time is not counted. It may return which
            rows end with it, and must then do so on every rank alike.

    Example::

        prompt = torch.tensor([list(b"def main(")])
        text = bytes(generate(model, prompt, tokens=64).tokens[0].tolist())
    """
    sampling, ends = Sampling(temperature, top_k, top_p, seed), sorted(set(stop or ()))
    prompts = Prompts.of(prompt_tokens)
    _check_agreement(model, prompts, tokens=tokens, stop=ends, **asdict(sampling))  # first: no rank waits for another
    _check_request(model.config, prompts, tokens)
    device = to_local(next(model.parameters())).device
    cache, sampler, stops = prompts.new_cache(model, tokens), Sampler(sampling), torch.tensor(ends, device=device)
    inputs = prompts.tokens.to(device, torch.long)
    selected: list[Tensor] = []
    seconds: list[float] = []
    done = torch.zeros(len(inputs), dtype=torch.bool, device=device)
    lengths = torch.zeros(len(inputs), dtype=torch.long, device=device)

    def sample(logits: Tensor) -> Tensor:
        if not selected and not bool(logits.isfinite().all()):
            raise ValueError("the model's logits are not finite: its training may have diverged")
        return sampler(logits)

    while len(selected) < tokens and not (selected and bool(done.all())):
        started = time.perf_counter()
        token = next_token(model, inputs, cache, sample)
        if selected:
            token = torch.where(done, selected[-1], token)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
        selected.append(token)
        lengths += ~done
        done |= torch.isin(token, stops)
        if on_token is not None and (ended := on_token(token)) is not None:
            done |= torch.tensor(ended, device=device)
        inputs = token[:, None]
    return Generation(torch.stack(selected, 1), lengths.tolist(), seconds[0], seconds[1:])


def _check_request(config: GPTConfig, prompts: Prompts, tokens: int) -> None:
    positive(tokens=tokens)
    shape, dtype = tuple(prompts.tokens.shape), prompts.tokens.dtype
    if len(shape) != 2 or 0 in shape or dtype.is_floating_point:
        raise ValueError(f"prompts must be (batch, length) whole numbers, at least one, got {dtype} {shape}")
    check_room(config, shape[1], tokens)
    check_tokens("tokens", prompts.tokens, config.vocab)


def check_room(config: GPTConfig, length: int, tokens: int) -> None:
    """Raise ValueError if a prompt of ``length`` tokens and ``tokens`` more do not fit into the model's context."""
    if length + tokens > config.context:
        given = f"a prompt of {length} tokens and {tokens} more"
        room = max(0, config.context - length)
        raise ValueError(f"{given} do not fit into the model's context of {config.context}: use at most {room}")


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
    sampling: Sampling | None = None,
    **settings: Any,
) -> dict[str, dict[str, Cost]]:
    """Measure the cost of one token of one row by models on the same ranks, of ``prefill`` and of ``decode``. Every
    rank of their mesh calls this.

    A prefill is the whole prompt, as for `generate`, and the selection of the first token by ``sampling``, by default
    the most likely one. Decode is one step in the middle of the ``tokens`` that follow, as attention covers more
    positions the longer the text is; there is none for one token. ``settings`` are those of `measure_calls`.
    """
    sampling = sampling or Sampling()
    prompts = Prompts.of(prompt)
    first = next(iter(models.values()))
    _check_agreement(
        first, prompts, tokens=tokens, models=list(models), profile=settings.get("profile"), **asdict(sampling)
    )
    device = to_local(next(first.parameters())).device
    batch, length = prompts.tokens.shape
    count = batch * length - (0 if prompts.starts is None else int(prompts.starts.sum()))  # without padding
    calls: dict[str, Call] = {}
    for name, model in models.items():
        _check_request(model.config, prompts, tokens)
        cache, inputs = prompts.new_cache(model, tokens), prompts.tokens.to(device, torch.long)
        calls[f"{name} prefill"] = Call(partial(_step, model, inputs, cache, 0, Sampler(sampling)), count)
        if tokens > 1:
            decode = partial(_step, model, inputs[:, -1:], cache, length + (tokens - 2) // 2, Sampler(sampling))
            calls[f"{name} decode"] = Call(decode, batch)
    costs = measure_calls(calls, first.mesh, device, **settings)
    phases = ("prefill", "decode")
    return {name: {phase: costs[key] for phase in phases if (key := f"{name} {phase}") in costs} for name in models}


def _step(model: GPT, inputs: Tensor, cache: Cache, position: int, sampler: Sampler) -> None:
    """Compute the next token at ``position`` of the cache, and wait for it."""
    cache.position = position
    next_token(model, inputs, cache, sampler)
    synchronize(inputs.device)


def measure_inference(
    configs: Mapping[str, GPTTrainConfig],
    context: ParallelContext,
    batch: int,
    *,
    turns: int,
    power: PowerProfile,
    prompt: int | None = None,
    tokens: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Decoding ``tokens`` after a ``prompt``, by default half the context each. A sample is a token of one sequence."""
    where: dict[str, Any] = {"mesh": context.tp, "device": context.device}
    models = {name: GPT(config.model, **where, wire=config.wire) for name, config in configs.items()}
    half = min(config.context for config in configs.values()) // 2
    length, tokens = prompt or half, tokens or half
    prompts = torch.zeros(batch, length, dtype=torch.int64, device=context.device)
    costs = measure_generation(models, prompts, tokens, turns=max(2, turns), profile=power)
    return {
        name: phases["decode"].inference_result(models[name])
        | {"batch": batch, "ranks": configs[name].ranks, "turns": turns}
        | {"prompt": length, "prefill_seconds": phases["prefill"].seconds}
        | {"prefill_joules": (phases["prefill"].joules or 0.0) * batch * length}
        for name, phases in costs.items()
    }


TOKENS = 128  # by default, if they fit into the context
_INTERRUPT = "interrupt"  # instead of a request: end the answer

Messages = list[dict[str, str]]


def run(
    config: GenerateConfig, prompts: Iterable[str], *, write: Callable[[str], None] | None = None, show: bool = False
) -> dict[str, Any]:
    """Generate a text from each prompt, in one batch, and measure it if the config says so. ``write`` is called with
    pieces of the first row's text as it is generated; ``show`` shows the progress of a measurement on stderr.

    Returns:
        Plain data: among others the ``texts`` and ``tokens`` of all rows, ``prefill_seconds`` and ``decode_seconds``;
        if measured, also ``measured``, for each model the costs of prefill and decode.
    """
    texts = list(prompts)
    model = _check(config)
    request = _request(config, model.config, texts)
    power = default_power_profile(config.profile, config.ranks) if config.measure else None
    if launch_device_type(config.ranks) == "cpu":  # accelerators have memories of their own
        _check_memory(model, config, request)

    def on_event(event: Any) -> None:
        if isinstance(event, str) and write is not None:
            write(event)

    result = launch(config.ranks, _serve, config, [request], power, show, on_report=on_event)
    lengths = [len(prompt) for prompt in request["prompts"]]
    asked = {"sampling": asdict(config.sampling), "prompts": texts, "prompt_lengths": lengths}
    return config.describe(power) | asked | result


def converse(
    config: GenerateConfig,
    conversation: Iterable[Messages],
    render: Callable[[Messages], str],
    *,
    write: Callable[[str], None],
    on_answer: Callable[[dict[str, Any]], None],
) -> None:
    """Answer the messages of a user one after the other, each as soon as it is there. The first SIGINT during an answer
    ends that answer.

    ``conversation`` yields all messages so far, of which the last is to be answered. The answer is appended to them;
    the oldest ones are removed when they do not fit into the model's context any more. ``render`` makes a prompt of
    messages, ``write`` gets pieces of an answer as it is generated and a new line after it, and ``on_answer`` the
    result, as of `run`.
    """
    if launched_externally():
        raise ValueError("a conversation needs a terminal: give a prompt under torchrun or srun")
    sizes, tokenizer = _check(config).config, find_tokenizer(config.model)
    reserved = min(config.tokens or TOKENS, sizes.context // 2)
    with _served(config) as answer:
        for messages in conversation:
            try:
                while len(messages) > 2:
                    length = len(encode_prompt(render(messages), tokenizer, sizes.vocab, chat=True))
                    if length + reserved <= sizes.context:
                        break
                    del messages[:2]
                request = _request(config, sizes, [render(messages)])
            except ValueError as error:
                print(printable(f"error: {error}"), file=sys.stderr)
                messages.pop()
                continue
            result = answer(request, write)
            write("\n")
            on_answer(result)
            messages.append({"role": "assistant", "content": result["texts"][0]})


@contextmanager
def _served(config: GenerateConfig) -> Iterator[Callable[[Any, Callable[[str], None]], dict[str, Any]]]:
    """A function that sends a request to ranks, writes the text as it is generated, and returns the result. Ranks are
    launched by another thread, as this one waits for the user and handles signals.
    """
    events: SimpleQueue[Any] = SimpleQueue()
    pipes: list[int] = []

    def launch_ranks(folder: str) -> None:
        try:
            launch(config.ranks, _serve, config, folder, None, False, on_report=events.put)
        except BaseException as error:
            events.put(error)

    def send(message: Any) -> None:
        for pipe in pipes:
            os.write(pipe, (json.dumps(message) + "\n").encode())

    def close() -> None:
        for pipe in pipes:
            os.close(pipe)
        thread.join(5.0)

    def next_event() -> Any:
        if isinstance(event := events.get(), BaseException):
            raise event
        return event

    def answer(request: dict[str, Any], write: Callable[[str], None]) -> dict[str, Any]:
        def interrupt(*_: Any) -> None:
            signal.signal(signal.SIGINT, before)  # a second one is handled as outside
            send(_INTERRUPT)

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            send(request)
            while not isinstance(event := next_event(), dict):
                write(event)
            return event
        finally:
            signal.signal(signal.SIGINT, before)

    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="phantom-"))
        thread = threading.Thread(target=copy_context().run, args=(launch_ranks, folder), daemon=True)
        stack.callback(close)
        for rank in range(config.ranks):
            os.mkfifo(_pipe(folder, rank), 0o600)
            pipes.append(os.open(_pipe(folder, rank), os.O_RDWR))  # does not wait for the reader
        thread.start()
        next_event()  # the models are loaded
        yield answer


def _check(config: GenerateConfig) -> GPT:
    """Check the options and files. Returns the model on the meta device."""
    model: GPT = check_model(config.model, config.ranks)
    model.config.check_ranks(config.ranks)
    if config.against != "none":
        _baseline_config(model.config).check_ranks(config.ranks)
    return model


def _request(config: GenerateConfig, sizes: GPTConfig, texts: list[str]) -> dict[str, Any]:
    """What ranks are to generate, as plain data."""
    tokenizer = find_tokenizer(config.model)
    prompts = [encode_prompt(text, tokenizer, sizes.vocab, chat=config.chat) for text in texts]
    longest = max(map(len, prompts))
    room = max(1, sizes.context - longest)
    tokens = config.tokens or (room if config.chat else min(TOKENS, room))
    check_room(sizes, longest, tokens)
    return {"prompts": prompts, "tokens": tokens, "stop": stop_tokens(config.model, chat=config.chat)}


def _baseline_config(config: GPTConfig) -> GPTConfig:
    """The config of the tensor-parallel model of the same sizes."""
    return replace(config, strategy="megatron", blocks=None, ghosts=None, layer_ghosts=None)


def _check_memory(model: GPT, config: GenerateConfig, request: dict[str, Any]) -> None:
    """Raise ValueError if the weights and caches of all models do not fit into the memory of local ranks."""
    models = [model] + ([] if config.against == "none" else [GPT(_baseline_config(model.config), device="meta")])
    sizes, rows = model.config, config.batch * len(request["prompts"])
    length = max(map(len, request["prompts"])) + request["tokens"]
    words = sum(parameter.numel() for each in models for parameter in each.parameters())
    words += len(models) * 2 * sizes.layers * rows * sizes.kv_heads * length * sizes.head_dim
    check_memory(config.ranks, words * next(model.parameters()).element_size())


def _serve(
    device: torch.device,
    config: GenerateConfig,
    requests: list[dict[str, Any]] | str,
    power: PowerProfile | None,
    show: bool,
    *,
    report: Callable[[Any], None],
) -> dict[str, Any]:
    """Run on one rank: load the model, generate for each request, or for those from the pipes of a folder, and measure
    the last one if the config says so. ``report`` gets None when the model is loaded, pieces of the first row's text,
    and the result of each request, of which the last is returned.
    """
    mesh = None if config.ranks == 1 else init_device_mesh(device.type, (config.ranks,), mesh_dim_names=("tp",))
    check_agreement("what to run", {name: str(value) for name, value in asdict(config).items()}, mesh)
    where: dict[str, Any] = {"mesh": mesh, "device": device, "wire": config.wire}
    model: GPT = load_model(config.model, strategy=strategy_on(config.model, config.ranks), **where)
    tokenizer, rank = find_tokenizer(config.model), 0 if mesh is None else mesh.get_local_rank()
    report(None)
    source = _RequestPipe(_pipe(requests, rank), device) if isinstance(requests, str) else requests
    interrupted = source.interrupted if isinstance(source, _RequestPipe) else lambda: False
    result: dict[str, Any] = {}
    for request in source:
        prompts = [torch.tensor(prompt) for prompt in request["prompts"] for _ in range(config.batch)]
        rows = [RowText(tokenizer, request["stop"], config.stop) for _ in prompts]
        result = _answer(model, config, prompts, request["tokens"], rows, interrupted, report) | {"device": device.type}
        report(result)
    if config.measure:
        models: dict[str, GPT] = {model.config.strategy: model}
        if config.against not in ("none", *models):
            dtype = next(model.parameters()).dtype
            models[config.against] = GPT(_baseline_config(model.config), dtype=dtype, **where)
        with ProgressDisplay(show=show and rank == 0) as display:
            display.stage("measuring: turn", config.turns)
            settings: dict[str, Any] = {"turns": config.turns, "sampling": config.sampling, "profile": power}
            generated = max(map(len, result["tokens"]))
            costs = measure_generation(models, prompts, generated, report=display.update, **settings)
        result["measured"] = {
            name: {phase: asdict(cost) for phase, cost in phases.items()}
            | {"parameters": sum(parameter.numel() for parameter in models[name].parameters())}
            for name, phases in costs.items()
        }
    return result


def _answer(
    model: GPT,
    config: GenerateConfig,
    prompts: list[Tensor],
    tokens: int,
    rows: list[RowText],
    interrupted: Callable[[], bool],
    report: Callable[[Any], None],
) -> dict[str, Any]:
    """Generate for one request, and report the first row's text as it grows."""
    shown = 0

    def report_text() -> None:
        nonlocal shown
        if len(text := rows[0].visible) > shown:
            report(text[shown:])
            shown = len(text)

    def on_token(tokens: Tensor) -> list[bool]:
        for row, token in zip(rows, tokens.tolist(), strict=True):
            if not row.ended:
                row.add(token)
        report_text()
        stopped = interrupted()
        return [stopped or row.ended for row in rows]

    made = generate(model, prompts, tokens=tokens, on_token=on_token, **asdict(config.sampling))
    for row in rows:
        row.ended = True
    report_text()
    texts = {"texts": [row.text for row in rows], "tokens": [row.tokens for row in rows]}
    return texts | {"prefill_seconds": made.prefill_seconds, "decode_seconds": sum(made.decode_seconds)}


def _pipe(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank-{rank}"


class _RequestPipe:
    """Requests of a conversation, which the launcher writes to a pipe as lines of JSON until it closes it."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self._file, self._device = open(path, "rb", buffering=0), device  # noqa: SIM115 (for `select`, without a buffer)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for line in self._file:
            if (message := json.loads(line)) != _INTERRUPT:  # otherwise the answer was complete before it came
                yield message

    def interrupted(self) -> bool:
        """Whether any rank has been sent something during an answer: an interrupt, or the end of the pipe."""
        sent = bool(select.select([self._file], [], [], 0)[0])
        flag = torch.tensor(float(sent), device=self._device)
        if dist.is_initialized():
            dist.all_reduce(flag)
        return bool(flag)
