"""``phantom generate`` for transformers: text first, its cost on request, on local or external ranks.

The launcher turns prompts into requests, each a dictionary of plain data. Every rank serves one request after the other
(`_serve`), and rank 0 reports text to the launcher as it grows. In a conversation each rank reads requests from a named
pipe of its own, so that none waits in a collective while the user types.
"""

import json
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import asdict, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel.checkpoint.model import load_model
from phantom_parallel.distributed.launch import check_memory, launch, launch_device_type
from phantom_parallel.distributed.launchers import launched_externally
from phantom_parallel.distributed.objects import check_agreement
from phantom_parallel.energy.power import PowerProfile
from phantom_parallel.families.gpt.config import GPTConfig
from phantom_parallel.families.gpt.generation import Generation, check_room, generate, measure_generation
from phantom_parallel.families.gpt.model import GPT
from phantom_parallel.families.gpt.tokens import RowText, encode_prompt, find_tokenizer, stop_tokens
from phantom_parallel.infer.measure import default_power_profile
from phantom_parallel.infer.predict import check_model, strategy_on
from phantom_parallel.infer.sampling import GenerateConfig
from phantom_parallel.utils.parsing import printable
from phantom_parallel.utils.progress import ProgressDisplay

TOKENS = 128  # by default, if they fit into the context
_INTERRUPT = "interrupt"  # instead of a request: end the answer
_POLL_SECONDS = 0.1  # how often the launcher looks for Ctrl-C during an answer

Messages = list[dict[str, str]]


def run(
    config: GenerateConfig, prompts: Iterable[str], *, write: Callable[[str], None] | None = None, show: bool = False
) -> dict[str, Any]:
    """Generate a text from each prompt, in one batch, and measure it if the config says so.

    Args:
        config: How to generate.
        prompts: The prompts, which may differ in length.
        write: Called with pieces of the first row's text as it is generated, on rank 0 or in its launcher.
        show: Whether to show progress of a measurement on stderr.

    Returns:
        Plain data: among others the ``texts`` and ``tokens`` of all rows, ``prefill_seconds`` and ``decode_seconds``;
        if measured, also ``measured``, for each model the costs of prefill and decode.

    Raises:
        ValueError, OSError: If options or files are wrong, mostly before any rank is launched.
        Interrupted: After SIGINT or SIGTERM.
        RankDied: If a rank died.
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

    Args:
        config: How to generate.
        conversation: Yields all messages so far, of which the last is to be answered. The answer is appended to them;
            the oldest ones are removed when they do not fit into the model's context any more.
        render: Makes a prompt of messages.
        write: Called with pieces of an answer as it is generated.
        on_answer: Called with each complete answer: its ``texts``, ``tokens`` and seconds, as of `run`.
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

    def next_event(interrupted: threading.Event) -> Any:
        while True:
            try:
                event = events.get(timeout=_POLL_SECONDS)
            except Empty:
                if interrupted.is_set():
                    interrupted.clear()
                    send(_INTERRUPT)
                continue
            if isinstance(event, BaseException):
                raise event
            return event

    def answer(request: dict[str, Any], write: Callable[[str], None]) -> dict[str, Any]:
        with _interruptible() as interrupted:
            send(request)
            while not isinstance(event := next_event(interrupted), dict):
                write(event)
            return event

    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="phantom-"))
        thread = threading.Thread(target=copy_context().run, args=(launch_ranks, folder), daemon=True)
        stack.callback(close)
        for rank in range(config.ranks):
            os.mkfifo(_pipe(folder, rank), 0o600)
            pipes.append(os.open(_pipe(folder, rank), os.O_RDWR))  # does not wait for the reader
        thread.start()
        next_event(threading.Event())  # the models are loaded
        yield answer


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Context in which the first SIGINT sets the event, and the second is handled as outside."""
    interrupted = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _check(config: GenerateConfig) -> GPT:
    """Check the options and files. Returns the model on the meta device."""
    model: GPT = check_model(config.model, config.ranks)
    model.config.check_ranks(config.ranks)
    if config.against != "none":
        _baseline_config(model.config).check_ranks(config.ranks)
    config.sampling.check_vocabulary(model.config.vocab)
    return model


def _request(config: GenerateConfig, sizes: GPTConfig, texts: list[str]) -> dict[str, Any]:
    """What ranks are to generate, as plain data."""
    tokenizer = find_tokenizer(config.model)
    prompts = [encode_prompt(text, tokenizer, sizes.vocab, chat=config.chat) for text in texts]
    longest = max(map(len, prompts))
    room = max(1, sizes.context - longest)
    tokens = config.tokens or (room if config.chat else min(TOKENS, room))
    check_room(sizes, longest, tokens)
    return {"prompts": prompts, "tokens": tokens, "stop": stop_tokens(config.model, sizes.vocab, chat=config.chat)}


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
    rank = 0 if mesh is None else mesh.get_local_rank()
    report(None)
    source = _RequestPipe(_pipe(requests, rank), device) if isinstance(requests, str) else requests
    interrupted = source.interrupted if isinstance(source, _RequestPipe) else lambda: False
    result: dict[str, Any] = {}
    for request in source:
        prompts = [torch.tensor(prompt) for prompt in request["prompts"] for _ in range(config.batch)]
        made, result = _answer(model, config, prompts, request, interrupted, report)
        result["device"] = device.type
        report(result)
    if config.measure:
        models: dict[str, GPT] = {model.config.strategy: model}
        if config.against not in ("none", *models):
            dtype = next(model.parameters()).dtype
            models[config.against] = GPT(_baseline_config(model.config), dtype=dtype, **where)
        with ProgressDisplay(show=show and rank == 0) as display:
            display.stage("measuring: turn", config.turns)
            settings: dict[str, Any] = {"turns": config.turns, "sampling": config.sampling, "profile": power}
            costs = measure_generation(models, prompts, max(made.lengths), report=display.update, **settings)
        result["measured"] = {
            name: {phase: cost.to_dict() for phase, cost in phases.items()}
            | {"parameters": sum(parameter.numel() for parameter in models[name].parameters())}
            for name, phases in costs.items()
        }
    return result


def _answer(
    model: GPT,
    config: GenerateConfig,
    prompts: list[Tensor],
    request: dict[str, Any],
    interrupted: Callable[[], bool],
    report: Callable[[Any], None],
) -> tuple[Generation, dict[str, Any]]:
    """Generate for one request, and report the first row's text as it grows."""
    tokenizer = find_tokenizer(config.model)
    rows = [RowText(tokenizer, request["stop"], config.stop) for _ in prompts]
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

    made = generate(model, prompts, tokens=request["tokens"], on_token=on_token, **asdict(config.sampling))
    for row in rows:
        row.finish()
    report_text()
    return made, {
        "texts": [row.text for row in rows],
        "tokens": [row.tokens for row in rows],
        "prefill_seconds": made.prefill_seconds,
        "decode_seconds": sum(made.decode_seconds),
    }


def _pipe(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank-{rank}"


class _RequestPipe:
    """Requests of a conversation, which the launcher writes to a pipe as lines of JSON until it closes it."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self._file, self._device = os.open(path, os.O_RDONLY), device
        self._read = b""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            while b"\n" not in self._read:
                if not (data := os.read(self._file, 1 << 16)):
                    return
                self._read += data
            line, _, self._read = self._read.partition(b"\n")
            if (message := json.loads(line)) != _INTERRUPT:  # otherwise the answer was complete before it came
                yield message

    def interrupted(self) -> bool:
        """Whether any rank has been sent something during an answer: an interrupt, or the end of the pipe."""
        sent = bool(self._read) or bool(select.select([self._file], [], [], 0)[0])
        flag = torch.tensor(float(sent), device=self._device)
        if dist.is_initialized():
            dist.all_reduce(flag)
        return bool(flag)
