"""The transformer against plain float64 maths: on one process and on real ranks, by every strategy."""

import math

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from phantom_parallel import GPT, GPTConfig
from tests.families.gpt import reference as gpt_reference
from tests.families.gpt.sample import config_of, one_mesh
from tests.reference import relative_error


def filled(config: GPTConfig, mesh=None, dtype=torch.float64, **kwargs) -> GPT:
    """A model with the reference's weights."""
    model = GPT(config, mesh=mesh, dtype=dtype, **kwargs)
    drawn = gpt_reference.draw(GPT(config, device="meta"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = drawn[name].to(dtype)
            if isinstance(parameter, DTensor):
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(whole)
    return model


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def gradients(model: GPT) -> dict[str, torch.Tensor]:
    return {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


def reference(config: GPTConfig, batch: int = 2) -> dict[str, torch.Tensor]:
    drawn = gpt_reference.draw(GPT(config, device="meta"))
    return gpt_reference.expected(drawn, config, *gpt_reference.tokens(config.vocab, batch))


def errors(config: GPTConfig, mesh=None, batch: int = 2, **kwargs) -> dict[str, float]:
    model = filled(config, mesh, **kwargs)
    inputs, targets = gpt_reference.tokens(config.vocab, batch)
    loss = model.loss(inputs, targets)
    loss.backward()
    actual = {"loss": loss.detach(), "logits": model.logits(inputs), **gradients(model)}
    expected = reference(config, batch)
    assert actual.keys() == expected.keys()
    return {name: relative_error(actual[name], expected[name]) for name in expected}


def errors_on_ranks(*args, **kwargs) -> dict[str, float]:
    return errors(*args, **kwargs, mesh=one_mesh())


VARIANTS = {
    "untied": {},
    "tied": {"tie_embeddings": True},
    "parallel block": {"parallel_block": True},
    "heads alike": {"kv_heads": 8, "rope_base": 500.0},
    "more rows than tokens": {"vocab": 8},
    "more rows than tokens, tied": {"vocab": 8, "tie_embeddings": True},
    "eight blocks": {"kv_heads": 8, "blocks": 8, "ghosts": 2, "tie_embeddings": True},
    "two blocks": {"kv_heads": 8, "blocks": 2, "ghosts": 8},  # which ranks share, on four and eight
    "two blocks, tied": {"blocks": 2, "ghosts": 4, "tie_embeddings": True},
    "ladder": {"ladder": True, "layers": 3},
    "ladder of parallel blocks, tied": {"ladder": True, "parallel_block": True, "tie_embeddings": True},
    "ladder of two parallel blocks": {"blocks": 2, "ghosts": 4, "ladder": True, "parallel_block": True},
    "two parallel blocks": {"blocks": 2, "ghosts": 4, "parallel_block": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("strategy", ["phantom", "megatron", "dense", "lowrank"])
def test_loss_logits_and_all_gradients_equal_plain_maths(strategy, variant):
    if strategy != "phantom" and "blocks" in VARIANTS[variant]:
        pytest.skip("only phantom has blocks")
    actual = errors(config_of(strategy, **VARIANTS[variant]))
    assert max(actual.values()) < 1e-11, actual


SIZES = {"phantom": (1, 2, 4), "megatron": (2, 4), "lowrank": (1, 2, 4)}
CASES = [(strategy, size, variant) for strategy in SIZES for size in SIZES[strategy] for variant in VARIANTS]
CASES = [case for case in CASES if case[0] == "phantom" or "blocks" not in VARIANTS[case[2]]]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("strategy", "size", "variant"), [*CASES, ("phantom", 8, "two blocks")])
def test_a_strategy_is_the_same_model_on_any_number_of_ranks(ranks, strategy, size, variant):
    for actual in ranks(size)(errors_on_ranks, config_of(strategy, **VARIANTS[variant])):
        assert max(actual.values()) < 1e-10, actual


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "changes", [{}, {"vocab": 8, "tie_embeddings": True}, {"parallel_block": True, "vocab": 8}, {"ladder": True}]
)
@pytest.mark.parametrize(
    ("strategy", "size"), [("phantom", 1), ("phantom", 2), ("phantom", 4), ("megatron", 2), ("lowrank", 2)]
)
def test_parts_of_a_batch_that_take_turns_are_the_same_model(ranks, strategy, size, changes):
    config = config_of(strategy, **changes)
    for actual in ranks(size)(errors_on_ranks, config, batch=4, interleave=2):
        assert max(actual.values()) < 1e-10, actual


def in_order(config: GPTConfig, wire: str) -> list[str]:
    """Starts and waits of the exchanges inside layers, and products, in order; backward after a bar."""
    model, names = filled(config, one_mesh(), wire=wire), []
    inputs, targets = gpt_reference.tokens(config.vocab)

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            if func.namespace == "_c10d_functional":
                names.append("wait" if name == "wait_tensor" else "start")
            elif "mm" in name:
                names.append("product")
            return func(*args, **(kwargs or {}))

    with Recorder():
        loss = model.loss(inputs, targets)
        names.append("|")
        loss.backward()
    return names


@pytest.mark.parametrize(("strategy", "wire"), [("phantom", "full"), ("megatron", "int8")])
def test_exchanges_of_a_ladder_travel_while_products_are_computed_both_ways(ranks, strategy, wire):
    ladder, serial = (config_of(strategy, ladder=on, layers=4) for on in (True, False))
    for names, usual in zip(ranks(2)(in_order, ladder, wire), ranks(2)(in_order, serial, wire), strict=True):
        bar, end = names.index("|"), usual.index("|")
        assert sorted(names) == sorted(usual)  # as many of each
        assert in_flight(names[:bar]) > 2 * in_flight(usual[:end])
        assert in_flight(names[bar:]) > 1.5 * in_flight(usual[end:])


def in_flight(names: list[str]) -> int:
    """Products that are computed while an exchange is in flight, once for each."""
    flying = total = 0
    for name in names:
        flying += {"start": 1, "wait": -1}.get(name, 0)
        total += flying if name == "product" else 0
    return total


def test_the_comparison_fails_where_two_ghosts_are_swapped():
    config = config_of()
    model = filled(config)
    inputs, targets = gpt_reference.tokens(config.vocab)
    with torch.no_grad():
        D = model.layers[1].mlp.gate_up.linear.decompress
        D[:10, :6] = D[:10, :6].roll(3, 1)
    assert relative_error(model.loss(inputs, targets), reference(config)["loss"]) > 1e-6


def test_the_reference_has_the_matrices_that_the_layers_say_they_equal():
    model = filled(config_of())
    drawn = gpt_reference.draw(model)
    for name in ("attention.qkv.linear", "attention.out", "mlp.gate_up.linear", "mlp.down"):
        dense = model.layers[1].get_submodule(name).to_dense().weight
        torch.testing.assert_close(dense.detach(), gpt_reference.weight(drawn, f"layers.1.{name}", 4))


def test_recomputing_changes_no_number(ranks):
    for actual in ranks(2)(errors_on_ranks, config_of(), activation_checkpointing=True):
        assert max(actual.values()) < 1e-10


def decoded(config: GPTConfig, on_ranks: bool) -> tuple[float, int]:
    """The largest difference of logits with a cache, in unequal pieces, from those of all at once."""
    mesh = one_mesh() if on_ranks else None
    model = filled(config, mesh)
    inputs, _ = gpt_reference.tokens(config.vocab)
    cache = model.new_cache(len(inputs), 12)
    pieces = [model.logits(piece, cache) for piece in inputs.split([3, 1, 1, 4], 1)]
    assert cache.position == inputs.shape[1]
    assert not any(piece.requires_grad for piece in pieces)
    expected = reference(config)["logits"]
    again = model.logits(inputs, model.new_cache(len(inputs)), last=True)
    worst = max(relative_error(torch.cat(pieces, 1), expected), relative_error(again, expected[:, -1:]))
    return worst, cache.keys.numel()


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}, {"ladder": True}])
@pytest.mark.parametrize("strategy", ["phantom", "megatron", "dense", "lowrank"])
def test_a_cache_gives_the_logits_of_all_at_once(strategy, changes):
    assert decoded(config_of(strategy, **changes), False)[0] < 1e-11


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["phantom", "megatron", "lowrank"])
def test_a_cache_on_ranks_holds_this_ranks_heads_only(ranks, strategy):
    _, alone = decoded(config_of(strategy), False)
    variants = [(2, {}), (2, {"tie_embeddings": True}), (2, {"parallel_block": True}), (2, {"ladder": True})]
    if strategy == "phantom":
        variants += [(4, VARIANTS["two blocks, tied"]), (4, VARIANTS["two parallel blocks"])]
    for size, variant in variants:
        for error, held in ranks(size)(decoded, config_of(strategy, **variant), True):
            assert error < 1e-11
            assert held == alone // size


def weights(config: GPTConfig) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    mesh = one_mesh() if torch.distributed.is_initialized() else None
    return {name: whole(p.detach()) for name, p in GPT(config, mesh=mesh).named_parameters()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("strategy", "cut"), [("phantom", {}), ("phantom", {"blocks": 2, "ghosts": 4}), ("megatron", {}), ("lowrank", {})]
)
def test_the_same_seed_draws_the_same_weights_on_any_number_of_ranks(ranks, strategy, cut, tied):
    config = config_of(strategy, tie_embeddings=tied, **cut)
    expected = weights(config)
    if strategy == "megatron":
        for name, value in weights(config_of("dense", tie_embeddings=tied)).items():
            assert torch.equal(value, expected[name])
    for actual in ranks(4)(weights, config)[:2]:
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert ("head.weight" in expected or "head.linear.weight" in expected) is not tied


@pytest.mark.parametrize("strategy", ["phantom", "dense", "lowrank"])
def test_a_new_model_knows_nothing_and_its_stream_keeps_its_energy(strategy):
    torch.manual_seed(0)
    rank = {"low_rank": 64} if strategy == "lowrank" else {}
    config = config_of(strategy, vocab=512, dim=256, layers=8, hidden=512, context=64, **rank)
    model, entered = GPT(config), []
    model.head.register_forward_pre_hook(lambda module, args: entered.append(args[0]))
    inputs = torch.randint(512, (4, 64))
    loss = float(model.loss(inputs, torch.randint(512, (4, 64))).detach())
    assert abs(loss - math.log(512) - 0.5) < 0.3  # logits of variance one: the mean of exp is e^(1/2)
    assert 0.8 < float(entered[0].detach().square().mean()) < 3.0
    expected = 0.0625 * config.hidden**-1.0  # 1 / (2 layers) / fan-in
    down = model.layers[3].mlp.down
    weight = {"phantom": lambda: down.local, "lowrank": lambda: down.to_dense().weight, "dense": lambda: down.weight}
    assert float(weight[strategy]().detach().var()) == pytest.approx(expected, rel=0.05)


def autocast_error(config: GPTConfig, on_ranks: bool) -> tuple[str, float]:
    mesh = one_mesh() if on_ranks else None
    model = filled(config, mesh, torch.float32)
    inputs, targets = gpt_reference.tokens(config.vocab)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(inputs, targets)
        dtype = model.logits(inputs).dtype
    loss.backward()
    expected = reference(config)
    return str(dtype), max(
        abs(float(loss.detach() / expected["loss"]) - 1) * 10,
        *(relative_error(gradient, expected[name]) for name, gradient in gradients(model).items()),
    )


def test_autocast(ranks):
    for config in (config_of(), config_of(tie_embeddings=True), config_of("lowrank")):
        for dtype, error in (autocast_error(config, False), *ranks(2)(autocast_error, config, True)):
            assert dtype == "torch.bfloat16"
            assert error < 0.1
