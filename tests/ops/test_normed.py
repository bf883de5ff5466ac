"""RMSNorm that rides on an exchange, against dense maths."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel.ops import SINGLE_RANK, phantom_linear
from phantom_parallel.ops.collectives import rank_group
from phantom_parallel.ops.head import vocabulary_logits
from tests.ops.test_phantom import EPS, TRANSFORMS, dense, expected_of, group_of, norm_weight, normalised
from tests.reference import Phantom, relative_error


def normed_phantom_linear(x: torch.Tensor, norm: torch.Tensor, *weights: torch.Tensor, **where) -> torch.Tensor:
    return phantom_linear(x, *weights, norm=norm, **where)


def gathered(native: bool, blocks: int) -> dict[str, float]:
    """Each rank multiplies the gathered features by its own rows, as a head does."""
    ranks = group_of(blocks, native)
    generator = torch.Generator().manual_seed(2)
    x, weight, head, d = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((2, 3, 8), (8,), (12, 8), (2, 3, 12))
    )
    whole = [t.clone().requires_grad_() for t in (x, weight, head)]
    z = normalised(whole[0], whole[1]) @ whole[2].T
    z.backward(d)

    dims = (-1, 0, 0)
    mine = [
        t.chunk(ranks.size, dim)[ranks.rank].clone().requires_grad_()
        for t, dim in zip((x, weight, head), dims, strict=True)
    ]
    own = vocabulary_logits(*mine, eps=EPS, group=ranks)
    own.backward(d.chunk(ranks.size, -1)[ranks.rank])
    errors = {"z": relative_error(own, z.chunk(ranks.size, -1)[ranks.rank])}
    for name, actual, expected, dim in zip(("x", "norm", "head"), mine, whole, dims, strict=True):
        errors[name] = relative_error(actual.grad, expected.grad.chunk(ranks.size, dim)[ranks.rank])
    return errors


@pytest.mark.parametrize("native", [False, True], ids=["all_to_all", "native"])
@pytest.mark.parametrize(("size", "blocks"), [(1, 4), (4, 4), (4, 2)])
def test_gathered_features_and_their_gradients_equal_dense(ranks, size, blocks, native):
    for errors in ranks(size)(gathered, native, blocks):
        assert max(errors.values()) < 1e-12, errors


def squares_in_low_precision(dtype: torch.dtype) -> float:
    """One large feature a rank: bfloat16 squares of them would be off by up to 1/256. The map is the identity."""
    ranks = rank_group(init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 4 * ranks.size, generator=generator).to(dtype)
    own = x.chunk(ranks.size, 1)[ranks.rank]
    local, compress = torch.eye(4, dtype=dtype), torch.zeros(1, 4, dtype=dtype)
    decompress = torch.zeros(4, ranks.size - 1, dtype=dtype)
    y = normed_phantom_linear(
        own, torch.ones(4, dtype=dtype), local, compress, decompress, eps=1e-5, blocks=ranks.size, group=ranks
    )
    exact = own.double() / (x.double().square().mean(1, keepdim=True) + 1e-5).sqrt()
    assert y.dtype == dtype
    return float((y.double() - exact).abs().max() / exact.abs().max()) / torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_squares_are_exact_where_the_exchange_is_not(ranks, dtype):
    """What is left is the rounding of the result itself, half a unit in its last place."""
    limit = 0.501 if dtype != torch.float32 else 2.0
    assert max(ranks(4)(squares_in_low_precision, dtype)) <= limit


def test_frozen_weights_get_no_gradient():
    reference = Phantom.random(4, 3, 5, 2)
    weights = [t.clone() for t in list(reference.packed().values())[:3]]
    x, norm = reference.x.clone().requires_grad_(), norm_weight(reference)
    for index in range(3):
        weights[index].requires_grad_()
        x.grad = None
        normed_phantom_linear(x, norm, *weights, eps=EPS, blocks=4).backward(reference.d)
        assert relative_error(x.grad, expected_of(reference, True)["x"]) < 1e-12
        assert [w.grad is not None for w in weights] == [i == index for i in range(3)]
        weights[index].requires_grad_(False).grad = None


def composed(x, norm, *weights, blocks: int) -> torch.Tensor:
    """RMSNorm and the dense map of the same weights, from torch's own functions."""
    return dense(torch.nn.functional.rms_norm(x, norm.shape, norm, EPS), *weights, None, blocks)


def leaves(reference: Phantom) -> tuple[list[torch.Tensor], torch.Tensor]:
    inputs = [reference.x, norm_weight(reference), *list(reference.packed().values())[:3]]
    return [t.detach().clone().requires_grad_() for t in inputs], reference.d.clone().requires_grad_()


@pytest.mark.parametrize("frozen", [False, True], ids=["all", "frozen_norm"])
def test_second_derivatives_equal_those_of_the_composed_function(frozen):
    inputs, d = leaves(Phantom.random(3, 2, 3, 1, rows=(4,)))
    inputs[1].requires_grad_(not frozen)
    needed = [t for t in inputs if t.requires_grad]
    results = []
    for function in (lambda: normed_phantom_linear(*inputs, eps=EPS, blocks=3), lambda: composed(*inputs, blocks=3)):
        first = torch.autograd.grad(function(), needed, d, create_graph=True)
        results.append(torch.autograd.grad(sum((g**2).sum() for g in first), [*needed, d]))
    for a, b in zip(*results, strict=True):
        assert relative_error(a, b) < 1e-11


def test_second_derivatives_of_a_head():
    inputs = [torch.rand(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 6), (6,), (4, 6))]
    assert torch.autograd.gradgradcheck(lambda *t: vocabulary_logits(*t, eps=EPS, group=SINGLE_RANK), inputs)


@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_transforms_of_torch_func_equal_the_composed_function(transform):
    inputs = tuple(t.detach() for t in leaves(Phantom.random(3, 2, 3, 1, rows=(4,)))[0])
    actual, expected = (
        TRANSFORMS[transform](f, inputs)
        for f in (lambda *t: normed_phantom_linear(*t, eps=EPS, blocks=3), lambda *t: composed(*t, blocks=3))
    )
    for a, b in zip(actual, expected, strict=True):
        assert relative_error(a, b) < 1e-12
