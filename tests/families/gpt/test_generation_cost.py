"""What generation costs: counts worked out by hand, energies against arithmetic, and models that take turns."""

from itertools import groupby

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel import GPT, EnergyMeter, GPTConfig, PowerProfile
from phantom_parallel.distributed.objects import RanksDisagree
from phantom_parallel.families.gpt.generation_cost import measure_generation
from phantom_parallel.infer.sampling import Sampling
from tests.infer.test_measure import Counted

SIZES = {"vocab": 24, "dim": 32, "layers": 2, "heads": 8, "kv_heads": 4, "hidden": 40, "context": 32}
BLOCKS, GHOSTS, BATCH, LENGTH, TOKENS = 4, 3, 3, 5, 6
PROFILE = PowerProfile("flat", 7.0, 7.0, 7.0, "made up")


def build(strategy: str, mesh=None) -> GPT:
    cut = {"blocks": BLOCKS, "ghosts": GHOSTS} if strategy == "phantom" else {}
    return GPT(GPTConfig(**SIZES, **cut, strategy=strategy), mesh=mesh)


def prompt() -> torch.Tensor:
    return torch.randint(24, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


def on_rank():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    models = {name: build(name, mesh) for name in ("phantom", "megatron")}
    return measure_generation(models, prompt(), TOKENS, 2, profile=PROFILE, sampling=Sampling(1.0, top_k=5))


def phantom_bytes(ranks: int, positions: int) -> float:
    """All ranks', float32: ghosts of four maps a layer, the norms' square beside two of them, then the head's features
    and square of the last position, and its logits.
    """
    layer = 4 * BLOCKS // ranks * GHOSTS + 2
    ends = 32 // ranks + 1 + 24 // ranks
    return 4 * ranks * (ranks - 1) * BATCH * (positions * 2 * layer + ends)


def megatron_bytes(ranks: int, positions: int) -> float:
    """Two all-reduces of the stream a layer and one for the embedding, each twice (R - 1) / R of it; and the logits."""
    reduced = 5 * positions * 2 * 32 * (ranks - 1)
    return 4 * BATCH * (reduced + (ranks - 1) * 24)


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_by_hand_and_power_times_time_is_energy(ranks, size):
    results = ranks(size)(on_rank)
    found = results[0]
    assert all(there == found for there in results)
    for name, moved in (("phantom", phantom_bytes), ("megatron", megatron_bytes)):
        one = found[name]
        assert (one.strategy, one.ranks, one.batch) == (name, size, BATCH)
        assert (one.prompt, one.tokens, one.turns) == (LENGTH, TOKENS, 2)
        assert one.prefill.bytes_per_token * BATCH * LENGTH == pytest.approx(moved(size, LENGTH))
        assert one.decode.bytes_per_token * BATCH == pytest.approx(moved(size, 1))
        for phase in (one.prefill, one.decode):
            assert phase.provenance == "modelled"
            assert phase.seconds > 0
            assert phase.seconds_p95 is None  # of fewer than 20 measurements
            assert 0 < phase.blocked_share < 1
        # At equal watts all seconds count alike: of all ranks, until the slowest has its token.
        assert one.prefill.joules_per_token == pytest.approx(size * 7.0 / one.prefill.tokens_per_second)
        assert one.decode.joules_per_token >= 0.999 * size * 7.0 / one.decode.tokens_per_second
        assert (one.time_to_first_token, one.time_per_token) == (one.prefill.seconds, one.decode.seconds)


def test_one_process_counts_and_no_watts():
    models = {"phantom": build("phantom"), "dense": build("dense")}
    found = measure_generation(models, prompt(), TOKENS, 1, meter=EnergyMeter(sources=(), device="cpu"))
    head_dim, heads = 4, 8
    layer = 32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 40  # weights of queries, keys and values; out; SwiGLU
    seen = LENGTH + (TOKENS - 2) // 2 + 1  # positions in the middle of decode
    step = 2 * (2 * layer + 32 * 24) + 2 * 2 * 2 * heads * head_dim * seen
    assert found["dense"].decode.flops_per_token == step
    assert found["dense"].parameters == 2 * (layer + 2 * 32) + 2 * 32 * 24 + 32
    for one in found.values():
        assert one.prefill.seconds_p95 is None  # of a single prefill
        assert one.decode.seconds_p95 is None  # of fewer than 20 tokens
        for phase in (one.prefill, one.decode):
            assert (phase.bytes_per_token, phase.blocked_share) == (0, 0)
            assert (phase.joules_per_token, phase.provenance) == (None, "unavailable")
        assert one.to_dict()["decode"]["seconds"] == one.time_per_token
    alone = measure_generation({"dense": models["dense"]}, prompt(), 1, 1)["dense"]
    assert (alone.decode, alone.time_per_token) == (None, None)


def test_sensors_go_before_the_model():
    models = {"phantom": build("phantom"), "dense": build("dense")}
    source = Counted(models)  # 3 J for every forward
    meter = EnergyMeter(sources=(source,), device="cpu")
    for one in measure_generation(models, prompt(), TOKENS, 1, profile=PROFILE, meter=meter).values():
        assert (one.prefill.provenance, one.decode.provenance) == ("counter", "counter")
        assert one.prefill.joules_per_token == pytest.approx(3.0 / (BATCH * LENGTH))
        assert one.decode.joules_per_token == pytest.approx(3.0 / BATCH)


def test_models_take_turns_the_order_alternates_and_tokens_are_told_once():
    models, log, results = {"a": build("phantom"), "b": build("dense")}, [], []
    for name, model in models.items():
        model.register_forward_hook(lambda *_, name=name: log.append(name))
    measure_generation(models, prompt(), TOKENS, 3, on_token=lambda token: results.append(token), report=log.append)
    turns = [list(part) for done, part in groupby(log, lambda entry: isinstance(entry, int)) if not done]
    assert turns[1] == ["b"] * TOKENS + ["a"] * TOKENS
    assert turns[2] == ["a"] * TOKENS + ["b"] * TOKENS
    assert [entry for entry in log if isinstance(entry, int)] == [1, 2, 3]
    assert [tuple(token.shape) for token in results] == [(BATCH,)] * TOKENS


def disagree_on_rank() -> None:
    models = {"phantom": build("phantom", init_device_mesh("cpu", (2,)))}
    with pytest.raises(RanksDisagree, match=r"ranks disagree on what to generate: rank . has tokens="):
        measure_generation(models, prompt(), 2 + dist.get_rank())
    with pytest.raises(ValueError, match=r"models must be on the same ranks, but phantom has 2 .* and dense 1"):
        measure_generation(models | {"dense": build("dense")}, prompt(), 2)


def test_ranks_that_disagree_and_models_apart(ranks):
    ranks(2)(disagree_on_rank)


def test_settings_that_make_no_sense():
    with pytest.raises(ValueError, match="there is no model to measure"):
        measure_generation({}, prompt(), 2)
    with pytest.raises(ValueError, match="turns must be a positive whole number, got 0"):
        measure_generation({"dense": build("dense")}, prompt(), 2, 0)
    with pytest.raises(ValueError, match="do not fit into the model's context of 32"):
        measure_generation({"dense": build("dense")}, prompt(), 30)
