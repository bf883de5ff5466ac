"""The tensor-parallel operator against dense maths."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel.ops import SINGLE_RANK, RankGroup, tensor_linear
from phantom_parallel.ops.collectives import rank_group
from tests.reference import relative_error


def compare(ranks: RankGroup, n_in: int, n_out: int, rows: tuple[int, ...], bias: bool = True) -> float:
    """The largest relative error of output and gradients of this rank's share, against ``F.linear``."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((*rows, n_in), (n_out, n_in), (n_out,), (*rows, n_out))
    x, weight, b, d = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    whole = [t.requires_grad_() for t in ((x, weight, b) if bias else (x, weight))]
    F.linear(*whole).backward(d)
    share = [
        t.detach().chunk(ranks.size, dim)[ranks.rank].clone().requires_grad_()
        for t, dim in zip(whole, (-1, 0, 0), strict=False)
    ]
    z = tensor_linear(*share, group=ranks)
    z.backward(d.chunk(ranks.size, -1)[ranks.rank])
    errors = [relative_error(z.detach(), F.linear(*whole).detach().chunk(ranks.size, -1)[ranks.rank])]
    for ours, theirs, dim in zip(share, whole, (-1, 0, 0), strict=False):
        errors.append(relative_error(ours.grad, theirs.grad.chunk(ranks.size, dim)[ranks.rank]))
    return max(errors)


def on_rank(native: bool, *args) -> float:
    ranks = rank_group(init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    return compare(ranks._replace(native=native or ranks.native), *args)


@settings(max_examples=30, deadline=None)
@given(
    n_in=st.integers(1, 9),
    n_out=st.integers(1, 9),
    rows=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    bias=st.booleans(),
)
def test_any_shape_equals_dense_on_one_process(n_in, n_out, rows, bias):
    assert compare(SINGLE_RANK, n_in, n_out, rows, bias) < 1e-12


def on_rank_in_all_ways() -> float:
    return max(on_rank(native, *shape, (2, 3)) for native in (False, True) for shape in ((16, 16), (8, 24)))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_output_and_gradients_equal_dense_on_real_ranks(ranks, size):
    assert max(ranks(size)(on_rank_in_all_ways)) < 1e-12


def twice() -> str:
    ranks = rank_group(init_device_mesh("cpu", (2,)))
    x, weight = torch.randn(3, 2, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    z = tensor_linear(x, weight, group=ranks)
    with pytest.raises(RuntimeError) as caught:
        torch.autograd.grad((z**2).sum(), (x, weight), create_graph=True)
    return str(caught.value)


def test_a_second_derivative_across_ranks_is_refused_rather_than_wrong(ranks):
    assert all("one process only" in text for text in ranks(2)(twice))


def test_gradgradcheck_on_one_process():
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3), (4, 3), (4,))]
    assert torch.autograd.gradgradcheck(tensor_linear, inputs)


def test_transforms_of_torch_func_equal_linear():
    x, weight, bias = (torch.randn(shape, dtype=torch.float64) for shape in ((2, 3), (4, 3), (4,)))
    tangents = tuple(torch.randn_like(t) for t in (x, weight, bias))
    actual = torch.func.jvp(tensor_linear, (x, weight, bias), tangents)
    expected = torch.func.jvp(torch.nn.functional.linear, (x, weight, bias), tangents)
    assert all(relative_error(a, b) < 1e-12 for a, b in zip(actual, expected, strict=True))
    assert relative_error(torch.vmap(tensor_linear, (0, None, None))(x, weight, bias), x @ weight.T + bias) < 1e-12
