"""Generation against plain float64 maths that looks at all positions anew for every token, on real ranks too."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from phantom_parallel import GPT, EnergyMeter, GPTConfig, PowerProfile
from phantom_parallel.families.gpt.cost import GPTShape
from phantom_parallel.families.gpt.generation import generate, measure_generation
from phantom_parallel.infer.sampling import Sampling
from tests.families.gpt import reference as gpt_reference
from tests.families.gpt.sample import config_of, one_mesh
from tests.families.gpt.test_model import filled

CONTEXT, TOKENS = 32, 10


def prompts() -> torch.Tensor:
    return torch.randint(24, (3, 5), generator=torch.Generator().manual_seed(7))


def continued(config: GPTConfig, prompt: torch.Tensor) -> list[list[int]]:
    """Without a cache and without the model: every token from a whole forward in float64."""
    params = gpt_reference.draw(GPT(config, device="meta"))
    for _ in range(TOKENS):
        two = gpt_reference.logits(params, config, prompt)[:, -1].topk(2)
        assert (two.values[:, 0] - two.values[:, 1]).min() > 1e-4  # far above rounding: only one answer is right
        prompt = torch.cat([prompt, two.indices[:, :1]], 1)
    return prompt[:, -TOKENS:].tolist()


@cache
def expected(config: GPTConfig) -> list[list[int]]:
    return continued(config, prompts())


def made(config: GPTConfig, prompts: torch.Tensor | list[torch.Tensor], mesh=None, **settings) -> list[list[int]]:
    model = filled(config, mesh, torch.float32)
    return generate(model, prompts, tokens=TOKENS, **settings).tokens.tolist()


def made_on_ranks(*args, **settings) -> list[list[int]]:
    return made(*args, one_mesh(), **settings)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("strategy", ["phantom", "megatron", "dense", "lowrank"])
def test_greedy_tokens_are_those_of_plain_maths(strategy, tied):
    config = config_of(strategy, tie_embeddings=tied, context=CONTEXT)
    assert made(config, prompts()) == expected(config)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("strategy", ["phantom", "megatron", "lowrank"])
def test_greedy_tokens_are_identical_on_any_number_of_ranks(ranks, strategy, size, tied):
    config = config_of(strategy, tie_embeddings=tied, context=CONTEXT)
    wanted = expected(config)
    for actual in ranks(size)(made_on_ranks, config, prompts()):
        assert actual == wanted


def test_stages_of_a_pipeline_generate_the_tokens_of_the_dense_model(ranks):
    config = config_of("pipeline", tie_embeddings=True, context=CONTEXT)
    wanted = expected(replace(config, strategy="dense"))
    assert ranks(2)(made_on_ranks, config, prompts()) == [wanted] * 2


UNEQUAL = (1, 5, 3, 4)


def unequal_prompts() -> list[torch.Tensor]:
    rows = torch.randint(24, (len(UNEQUAL), 5), generator=torch.Generator().manual_seed(11))
    return [row[:length] for row, length in zip(rows, UNEQUAL, strict=True)]


@pytest.mark.parametrize("strategy", ["phantom", "megatron", "dense"])
def test_prompts_of_unequal_length_are_continued_as_each_would_be_by_itself(ranks, strategy):
    config = config_of(strategy, context=CONTEXT)
    expected = [continued(config, prompt[None])[0] for prompt in unequal_prompts()]
    assert made(config, unequal_prompts()) == expected
    if strategy != "dense":
        assert ranks(2)(made_on_ranks, config, unequal_prompts()) == [expected] * 2


SAMPLED = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "seed": 11}


@pytest.mark.parametrize("strategy", ["phantom", "megatron"])
def test_draws_are_the_same_on_any_number_of_ranks(ranks, strategy):
    config = config_of(strategy, context=CONTEXT)
    alone = made(config, prompts(), **SAMPLED)
    assert ranks(4)(made_on_ranks, config, prompts(), **SAMPLED) == [alone] * 4
    assert alone != made(config, prompts())


def test_tokens_are_reported_and_rows_end_where_the_callback_says():
    model, streamed = filled(config_of(context=CONTEXT)), []
    made = generate(model, prompts(), tokens=4, on_token=lambda token: streamed.append(token.tolist()))
    assert [list(row) for row in zip(*streamed, strict=True)] == made.tokens.tolist()
    assert (made.lengths, len(made.decode_seconds)) == ([4, 4, 4], 3)
    free, steps = expected(model.config), iter([[False, True, False], [True, True, False], [True] * 3])
    made = generate(model, prompts(), tokens=TOKENS, on_token=lambda token: next(steps))
    assert made.lengths == [2, 1, 3]
    for row, length, whole in zip(made.tokens.tolist(), made.lengths, free, strict=True):
        assert row[:length] == whole[:length]


def test_rows_end_at_a_token_to_stop_at():
    model = filled(config_of(context=CONTEXT))
    free = expected(model.config)
    stop = {free[0][2], free[1][4]}
    wanted = [next((i + 1 for i, token in enumerate(row) if token in stop), TOKENS) for row in free]
    made = generate(model, prompts(), tokens=TOKENS, stop=stop)
    assert made.lengths == wanted
    for row, end, whole in zip(made.tokens.tolist(), wanted, free, strict=True):
        assert row[:end] == whole[:end]
        assert set(row[end:]) <= {row[end - 1]}
    assert made.tokens.shape[1] == max(wanted)  # nothing is computed in vain


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        (prompts(), {"tokens": 28}, "at most 27"),
        (torch.zeros(1, 0, dtype=torch.long), {}, r"\(1, 0\)"),
        (torch.zeros(1, 5), {}, "torch.float32"),
    ],
)
def test_requests_that_cannot_be_met(prompt, settings, message):
    model = filled(config_of(context=CONTEXT))
    with pytest.raises(ValueError, match=message):
        generate(model, prompt, **({"tokens": 2} | settings))


BATCH, LENGTH, MEASURED = 3, 5, 6
FLAT = PowerProfile("flat", 7.0, 7.0, 7.0, "made up")


def build(strategy: str, mesh=None) -> GPT:
    return GPT(config_of(strategy, context=CONTEXT), mesh=mesh)


def costs_on_rank():
    mesh = one_mesh()
    models = {name: build(name, mesh) for name in ("phantom", "megatron")}
    return measure_generation(models, prompts(), MEASURED, turns=2, profile=FLAT, sampling=Sampling(1.0, top_k=5))


def test_bytes_are_those_of_the_formulas_and_power_times_time_is_energy(ranks):
    size = 4
    results = ranks(size)(costs_on_rank)
    assert all(costs == results[0] for costs in results)
    for name, phases in results[0].items():
        shape = GPTShape(config_of(name, context=CONTEXT), ranks=size, batch=BATCH)
        prefill, decode = phases["prefill"], phases["decode"]
        assert prefill.bytes * BATCH * LENGTH == pytest.approx(size * shape.prefill(LENGTH).moved_bytes())
        assert decode.bytes * BATCH == pytest.approx(size * shape.decode(LENGTH).moved_bytes())
        for cost in (prefill, decode):
            assert cost.provenance == "modelled"
            assert 0 < cost.blocked_share < 1
            # At equal watts all seconds count alike: of all ranks, until the slowest has its token.
            assert cost.joules == pytest.approx(size * 7.0 / cost.items_per_second)


def test_flops_of_one_process_by_hand():
    meter = EnergyMeter(sources=(), device="cpu")
    costs = measure_generation({"dense": build("dense")}, prompts(), MEASURED, turns=1, meter=meter)["dense"]
    head_dim, heads = 4, 8
    layer = 32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 40  # weights of queries, keys and values; out; SwiGLU
    seen = LENGTH + (MEASURED - 2) // 2 + 1  # positions in the middle of decode
    assert costs["decode"].flops == 2 * (2 * layer + 32 * 24) + 2 * 2 * 2 * heads * head_dim * seen
    assert (costs["prefill"].bytes, costs["prefill"].joules) == (0, None)
    assert list(measure_generation({"dense": build("dense")}, prompts(), 1, turns=1)["dense"]) == ["prefill"]
