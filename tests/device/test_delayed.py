"""Operators and layers on a group whose collectives run as late as they may, against dense float64 maths.

The functions that ranks run are those of the tests on gloo. Here they take the native collectives of accelerators.
"""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from phantom_parallel.families.gpt.model import GPT
from phantom_parallel.ops import collectives
from phantom_parallel.ops.collectives import RankGroup, finish, rank_group, start_all_gather, start_reduce_scatter
from tests.device import delayed
from tests.families.gpt.sample import config_of, one_mesh
from tests.families.gpt.test_model import VARIANTS, errors_on_ranks
from tests.nn import test_integration, test_linear, test_plans, test_style
from tests.ops import (
    test_distillation,
    test_features,
    test_head,
    test_interleaved,
    test_normed,
    test_phantom,
    test_tensor,
    test_vocabulary,
    test_wire,
)
from tests.pool import Pools, RankFailed
from tests.reference import Phantom, relative_error


@pytest.fixture(scope="module")
def late_ranks() -> Iterator[Pools]:
    """As ``ranks``, on a delayed group."""
    pools = Pools(delayed.NAME)
    yield pools
    pools.close()


def largest(errors: Any) -> float:
    """The largest of errors in dicts and lists; True is none."""
    if isinstance(errors, dict):
        errors = list(errors.values())
    if isinstance(errors, list | tuple):
        return max((largest(error) for error in errors), key=lambda error: (error != error, error))
    return float(not errors) if isinstance(errors, bool) else float(errors)


def phantom(blocks: int) -> list[Any]:
    inside = max(1, dist.get_world_size() // blocks)
    sizes = 3 * inside, 7 * inside, 2 * inside
    return [test_phantom.on_rank(True, normed, blocks, *sizes, rows=(2, 3)) for normed in (False, True)]


def interleaved(normed: bool) -> bool:
    return not test_interleaved.differs("full", normed, True)


def heads() -> list[Any]:
    return [test_head.errors(way, True)[1] for way in test_head.WAYS] + [test_normed.gathered(True, 4)]


def losses() -> list[Any]:
    (loss, gradient), (expected, whole) = (test_distillation.divergence(size) for size in (dist.get_world_size(), 1))
    own = whole.chunk(dist.get_world_size(), -1)[dist.get_rank()]
    actual = [relative_error(loss, expected), relative_error(gradient, own), test_vocabulary.losses(True, 1.0)[2]]
    return [*actual, *test_vocabulary.against_torch("some ignored"), test_vocabulary.turned()]


def wire(name: str) -> list[Any]:
    functions = test_wire.tensor_errors, test_wire.megatron_errors, test_wire.feature_errors
    return [function(name, True) for function in functions] + [
        test_wire.phantom_errors(name, True, 4, normed) for normed in (False, True)
    ]


def layer(blocks: int) -> list[float]:
    inside = max(1, dist.get_world_size() // blocks)
    reference = Phantom.random(blocks, 3 * inside, 4 * inside, 2 * inside, rows=(2, 3))
    expected, actual = reference.expected() | {"refitted": reference.weight()}, test_linear.run_layer(reference)
    names = "local", "compress", "decompress", "bias", "refitted"
    return [relative_error(actual[name], expected[name]) for name in names]


def gpt(variant: str, batch: int = 2, interleave: int = 1) -> dict[str, float]:
    return errors_on_ranks(config_of(**VARIANTS[variant]), batch=batch, interleave=interleave)


def several() -> list[Any]:
    return [test_tensor.on_rank(True, 8, 24, (2, 3)), losses(), test_features.there_and_back(), wire("int8")]


CASES: dict[str, tuple[tuple[int, ...], Any]] = {  # ranks, and the function with its arguments
    "phantom": ((2, 4), (phantom, 4)),
    "phantom, several blocks a rank": ((2,), (phantom, 8)),
    "phantom, two ranks a block": ((4,), (phantom, 2)),
    "interleaved": ((2,), (interleaved, True)),
    "tensor": ((2,), (test_tensor.on_rank, True, 8, 24, (2, 3))),
    "heads": ((2, 4), (heads,)),
    "losses": ((2,), (losses,)),
    "features": ((2,), (test_features.there_and_back,)),
    "int8": ((2,), (wire, "int8")),
    "layer": ((2, 4), (layer, 2)),
    "gpt": ((2,), (gpt, "tied")),
}
_FFN, _SHARED = test_integration.CONFIG, test_integration.SHARED
SLOW: dict[str, tuple[tuple[int, ...], Any]] = {
    "interleaved, plain": ((2,), (interleaved, False)),
    "interleaved gpt": ((2, 4), (gpt, "more rows than tokens", 4, 2)),
    "tensor, losses, features, int8": ((4,), (several,)),
    "bf16": ((2, 4), (wire, "bf16")),
    "megatron": ((2, 4), (errors_on_ranks, config_of("megatron"))),
    "activation checkpointing": ((2, 4), (test_integration.checkpointed, _FFN)),
    "clipping": ((2, 4), (test_integration.clipped, _SHARED)),
    "fsdp, accumulated": ((4,), (test_integration.fully_sharded, True, ("tp",), _FFN)),
    **{f"gpt, {name}": ((2, 4), (gpt, name)) for name in VARIANTS},
    "style": ((2, 4), (test_style.sequence_parallel,)),
    "plan": ((2,), (test_plans.errors_of_plan, "whole model")),
}


def parameters() -> Iterator[Any]:
    for cases, marks in ((CASES, ()), (SLOW, pytest.mark.slow)):
        for name, (sizes, call) in cases.items():
            yield from (pytest.param(size, call, marks=marks, id=f"{name}-{size}") for size in sizes)


@pytest.mark.parametrize(("size", "call"), list(parameters()))
def test_results_and_gradients_equal_dense_maths(late_ranks, size, call):
    for errors in late_ranks(size)(*call):
        assert largest(errors) < 1e-9, errors


def group_and_rows() -> tuple[RankGroup, torch.Tensor]:
    group = rank_group(one_mesh())
    assert group.native
    return group, torch.full((3, 4), 1.0 + group.rank)


def without_a_wait() -> list[bool]:
    """Whether all that is read early is NaN, and all that was waited for is not."""
    group, x = group_and_rows()
    pending = start_all_gather(x, group)
    early = pending.message.clone()
    arrived = finish(pending).values
    return [bool(early.isnan().all()), arrived[:, 0, 0].tolist() == [1.0, 2.0]]


def changed_input() -> None:
    group, x = group_and_rows()
    pending = start_all_gather(x, group)
    x.add_(1.0)
    finish(pending)


def written_output() -> None:
    group, x = group_and_rows()
    pending = start_reduce_scatter(x.expand(2, 3, 4).contiguous(), group)
    pending.message.zero_()
    finish(pending)


def not_contiguous() -> None:
    _, x = group_and_rows()
    dist.all_gather_into_tensor(x.new_empty(8, 3), x.t())


def short_integers() -> None:
    _, x = group_and_rows()
    dist.all_reduce(x.short())


def never_waiting() -> Any:
    """The layers with a finish that does not wait."""
    with mock.patch.object(collectives, "_wait", lambda message: message):
        return phantom(4)


def communicators() -> tuple[str, str]:
    head = GPT(config_of(vocab=8), mesh=one_mesh()).head
    weight = head.send_weight(1 << 20)
    weight.whole()
    return head.group.name, weight.group.name


def test_no_exchange_of_layers_queues_behind_the_weight_of_the_head(late_ranks):
    for layers, weight in late_ranks(2)(communicators):
        assert layers != weight


def test_what_is_read_before_its_wait_is_not_a_number(late_ranks):
    assert late_ranks(2)(without_a_wait) == [[True, True]] * 2
    for errors in late_ranks(2)(never_waiting):
        assert largest(errors) != largest(errors)


@pytest.mark.parametrize(
    ("bug", "message"),
    [
        (changed_input, "an input of shape .3, 4. was changed"),
        (written_output, "an output of shape .3, 4. was written"),
        (not_contiguous, "Tensors must be contiguous"),
        (short_integers, "data type is not supported"),
    ],
)
def test_what_nccl_does_not_allow_raises(late_ranks, bug, message):
    with pytest.raises(RankFailed, match=message):
        late_ranks(2)(bug)
