"""``phantom generate`` for transformers: text and its cost, on local ranks that are launched here or on ranks of an
external launcher.
"""

import os
import signal
from contextlib import ExitStack
from dataclasses import asdict, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phantom_parallel.checkpoint.model import load_model
from phantom_parallel.distributed.errors import Interrupted
from phantom_parallel.distributed.launch import launch, launch_device_type
from phantom_parallel.distributed.launchers import launched_externally
from phantom_parallel.distributed.objects import broadcast_from_rank_zero, check_agreement
from phantom_parallel.distributed.signals import StopRequest
from phantom_parallel.energy.power import PowerProfile
from phantom_parallel.families.gpt.config import GPTConfig
from phantom_parallel.families.gpt.generation import check_room
from phantom_parallel.families.gpt.generation_cost import measure_generation
from phantom_parallel.families.gpt.model import GPT
from phantom_parallel.families.gpt.prompts import Streamer, encode_prompt, find_tokenizer, read_prompts
from phantom_parallel.infer.generation import GenerateConfig, GenerateReport, print_text
from phantom_parallel.infer.run import check_model, power_profile, strategy_on
from phantom_parallel.utils import resources
from phantom_parallel.utils.progress import ProgressDisplay

TOKENS = 128  # by default, if they fit into the context


class _Request(NamedTuple):
    """A checked request, which one process prepares for all ranks."""

    texts: list[bytes]
    prompts: list[list[int]]
    tokens: int
    power: PowerProfile | None


def run(config: GenerateConfig, *, write: bool = False, show: bool = False) -> GenerateReport:
    """Generate and measure.

    Args:
        config: What to generate.
        write: Whether to write the first row's text to stdout as it is generated.
        show: Whether to show progress on stderr.

    Raises:
        ValueError, OSError: If options or files are wrong, mostly before any rank starts.
        Interrupted: After SIGINT or SIGTERM.
        RankDied: If a rank died.
    """
    joined = launched_externally()
    request = None if joined else prepare(config)
    return launch(config.ranks, _work, config, request, joined, write, show)


def prepare(config: GenerateConfig) -> _Request:
    """Check the options and files, in one process."""
    texts = read_prompts(config.prompts, config.prompt_file)
    model = check_model(config.model, config.ranks)
    assert isinstance(model, GPT)  # the command looks the family up by the model
    model.config.check_ranks(config.ranks)
    if config.against == "megatron":
        baseline_config(model.config).check_ranks(config.ranks)
    config.sampling.check_vocabulary(model.config.vocab)
    tokenizer = find_tokenizer(config.model)
    prompts = [encode_prompt(text, tokenizer, model.config, template=config.chat)[0].tolist() for text in texts]
    longest = max(map(len, prompts))
    tokens = max(1, min(TOKENS, model.config.context - longest)) if config.tokens is None else config.tokens
    check_room(model.config, longest, tokens)
    power = power_profile(config.profile, config.ranks)
    if launch_device_type(config.ranks) == "cpu":  # accelerators have memories of their own
        _check_memory(model, longest + tokens, config)
    return _Request(texts, prompts, tokens, power)


def baseline_config(config: GPTConfig) -> GPTConfig:
    """Return the config of the tensor-parallel model of the same sizes."""
    return replace(config, strategy="megatron", blocks=None, ghosts=None, layer_ghosts=None)


def _check_memory(model: GPT, length: int, config: GenerateConfig) -> None:
    """Raise ValueError if the weights and caches of both models do not fit into the memory of local ranks."""
    models = [model] + ([GPT(baseline_config(model.config), device="meta")] if config.against == "megatron" else [])
    words = sum(prod(parameter.shape) for each in models for parameter in each.parameters())
    sizes = model.config
    words += len(models) * 2 * sizes.layers * config.rows * sizes.kv_heads * length * sizes.head_dim
    word = next(model.parameters()).element_size()
    needed, free = config.ranks * resources.PROCESS_BYTES + words * word, resources.available_bytes()
    if free is not None and needed > free:
        raise ValueError(
            f"ranks={config.ranks} and batch={config.batch} need at least {needed / 2**30:.1f} GiB of memory, "
            f"{free / 2**30:.1f} GiB are free: use fewer of them, or no model to compare with"
        )


def _work(
    device: torch.device, config: GenerateConfig, request: _Request | None, joined: bool, write: bool, show: bool
) -> GenerateReport:
    """Run on one rank."""
    if joined:
        request = broadcast_from_rank_zero(lambda: prepare(config), device)
    elif config.ranks > 1:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends a worker silently: its launcher receives it as well
    assert request is not None
    mesh = None if config.ranks == 1 else init_device_mesh(device.type, (config.ranks,), mesh_dim_names=("tp",))
    check_agreement("what to run", {name: str(value) for name, value in asdict(config).items()}, mesh)
    strategy = strategy_on(config.model, config.ranks)
    model = load_model(config.model, mesh=mesh, device=device, strategy=strategy, wire=config.wire)
    assert isinstance(model, GPT)
    models = {model.config.strategy: model} | _baseline(model, config, mesh, device)
    rank_zero = mesh is None or mesh.get_local_rank() == 0
    streamer = Streamer(find_tokenizer(config.model), print_text if write and rank_zero else lambda _: None)
    prompts = [torch.tensor(prompt) for prompt in request.prompts for _ in range(config.batch)]
    turns = config.turns if len(models) > 1 else 1
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest()) if mesh is None else None

        def check_stop() -> None:
            if stop is not None and stop.requested:
                raise Interrupted("stopped by a signal")

        def on_token(tokens: torch.Tensor) -> None:
            check_stop()
            streamer.add(tokens)

        def on_turn(turn: int) -> None:
            check_stop()
            display.update(turn)

        display = stack.enter_context(ProgressDisplay(show=show and rank_zero and turns > 1))
        display.stage("measuring: turn", turns)
        measured = measure_generation(
            models,
            prompts,
            request.tokens,
            turns,
            sampling=config.sampling,
            profile=request.power,
            on_token=on_token,
            report=on_turn,
        )
    texts = streamer.finish()
    return GenerateReport(
        model=os.fspath(config.model),
        ranks=config.ranks,
        device=device.type,
        wire=config.wire,
        prompt=request.texts[0].decode(errors="replace"),
        prompt_tokens=len(request.prompts[0]),
        prompts=[text.decode(errors="replace") for text in request.texts],
        prompt_lengths=[len(prompt) for prompt in request.prompts],
        texts=texts,
        tokens=streamer.tokens,
        sampling=config.sampling,
        profile=None if request.power is None else request.power.name,
        profile_source=None if request.power is None else request.power.source,
        measured=measured,
    )


def _baseline(model: GPT, config: GenerateConfig, mesh: DeviceMesh | None, device: torch.device) -> dict[str, GPT]:
    """Build the baseline with random weights; none if it is not requested, or if the model itself is of that kind."""
    if config.against == "none" or model.config.strategy == config.against:
        return {}
    dtype = next(model.parameters()).dtype
    where: dict[str, Any] = {"mesh": mesh, "device": device, "dtype": dtype, "wire": config.wire}
    return {config.against: GPT(baseline_config(model.config), **where)}
