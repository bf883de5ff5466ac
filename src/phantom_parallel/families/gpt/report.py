"""What comparisons measure of transformers beside their training, and what reports say about them."""

from collections.abc import Mapping
from typing import Any, cast

import torch

from phantom_parallel.distributed.context import ParallelContext
from phantom_parallel.energy import PowerProfile
from phantom_parallel.families.gpt.generation_cost import measure_generation
from phantom_parallel.families.gpt.model import GPT
from phantom_parallel.families.gpt.train_config import GPTTrainConfig
from phantom_parallel.train.config import TrainConfig

TOKENS = 10  # decoded in a turn


def measure_inference(
    configs: Mapping[str, TrainConfig], context: ParallelContext, batch: int, *, turns: int, power: PowerProfile
) -> dict[str, dict[str, Any]]:
    """Decoding by each strategy behind a prompt of half the context; a sample is one token of one sequence."""
    trainings = {name: cast(GPTTrainConfig, config) for name, config in configs.items()}
    where: dict[str, Any] = {"mesh": context.tp, "device": context.device}
    models = {name: GPT(one.gpt(), **where, wire=one.wire) for name, one in trainings.items()}
    half = min(one.context for one in trainings.values()) // 2
    prompt = torch.zeros(batch, half, dtype=torch.int64, device=context.device)
    costs = measure_generation(models, prompt, tokens=min(half, TOKENS), turns=max(2, turns // TOKENS), profile=power)
    found = {}
    for name, cost in costs.items():
        decode = cost.decode
        assert decode is not None  # several tokens
        found[name] = {
            "ranks": cost.ranks,
            "batch": cost.batch,
            "latency_seconds": decode.seconds,
            "latency_p95": decode.seconds_p95,
            "samples_per_second": decode.tokens_per_second,
            "flops_per_sample": decode.flops_per_token,
            "bytes_per_sample": decode.bytes_per_token,
            "joules_per_sample": decode.joules_per_token,
            "provenance": decode.provenance,
            "blocked_share": decode.blocked_share,
            "parameters": cost.parameters,
            "prefill_seconds": cost.prefill.seconds,
            "prompt": cost.prompt,
        }
    return found
