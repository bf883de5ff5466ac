"""The phantom operator against dense maths: on one process, on real ranks, and on hundreds of simulated ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel.ops import SINGLE_RANK, RankGroup, phantom_linear
from phantom_parallel.ops.collectives import block_group, rank_group
from tests.reference import Phantom, relative_error
from tests.simulated import simulated_levels, simulated_ranks

NAMES = ("local", "compress", "decompress", "bias")
EPS = 0.03  # of the norm; large enough to show where it is left out
with_and_without_norm = pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])


def norm_weight(reference: Phantom) -> torch.Tensor:
    width = reference.x.shape[-1]
    return 1 + 0.4 * torch.randn(width, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def normalised(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def inputs_of(reference: Phantom, normed: bool) -> dict[str, torch.Tensor]:
    """The tensors of the map, with a bias or with a norm."""
    inputs = {"x": reference.x} | reference.packed()
    if normed:
        del inputs["bias"]
        inputs["norm"] = norm_weight(reference)
    return inputs


def expected_of(reference: Phantom, normed: bool) -> dict[str, torch.Tensor]:
    """The reference's own gradients; with a norm those of the map after it, and autograd through its definition."""
    if not normed:
        return reference.expected()
    x, weight = reference.x.clone().requires_grad_(), norm_weight(reference).requires_grad_()
    normal, zero = normalised(x, weight), torch.zeros_like(reference.bias)
    actual = Phantom(reference.L, reference.C, reference.D, zero, normal.detach(), reference.d).expected()
    dx, d_weight = torch.autograd.grad(normal, (x, weight), actual["x"])
    del actual["bias"]
    return actual | {"x": dx, "norm": d_weight}


def results(inputs: dict[str, torch.Tensor], reference: Phantom, group: RankGroup, share) -> dict[str, torch.Tensor]:
    """Output and all gradients of what ``share(tensor, dim)`` holds."""
    eps = EPS if "norm" in inputs else None
    inputs = {name: share(t, -1 if name == "x" else 0).requires_grad_() for name, t in inputs.items()}
    z = phantom_linear(**inputs, eps=eps, blocks=reference.blocks, group=group)
    z.backward(share(reference.d, -1))
    return {"z": z.detach()} | {name: t.grad for name, t in inputs.items()}


def compare(reference: Phantom, normed: bool = False, group: RankGroup = SINGLE_RANK) -> dict[str, float]:
    def share(t: torch.Tensor, dim: int) -> torch.Tensor:
        return t.chunk(group.size, dim)[group.rank].clone()

    expected, actual = expected_of(reference, normed), results(inputs_of(reference, normed), reference, group, share)
    assert actual.keys() == expected.keys()
    return {name: relative_error(t, share(expected[name], -1 if name in "zx" else 0)) for name, t in actual.items()}


def group_of(blocks: int, native: bool) -> RankGroup:
    """All ranks, with their two levels where they are more than the blocks."""
    made = block_group(init_device_mesh("cpu", (torch.distributed.get_world_size(),)), blocks)
    levels = {name: getattr(made, name) for name in ("inter_block", "intra_block")}
    levels = {name: level and level._replace(native=native or level.native) for name, level in levels.items()}
    return made._replace(native=native or made.native, **levels)


def on_rank(native: bool, normed: bool, blocks: int, *args, **kwargs) -> dict[str, float]:
    return compare(Phantom.random(blocks, *args, **kwargs), normed, group_of(blocks, native))


@settings(max_examples=80, deadline=None)
@given(
    blocks=st.integers(2, 7),
    block_in=st.integers(1, 6),
    block_out=st.integers(1, 6),
    ghosts=st.integers(1, 4),
    rows=st.lists(st.integers(0, 4), min_size=0, max_size=3).map(tuple),
    normed=st.booleans(),
)
def test_any_shape_equals_dense_on_one_process(blocks, block_in, block_out, ghosts, rows, normed):
    errors = compare(Phantom.random(blocks, block_in, block_out, ghosts, rows), normed)
    assert max(errors.values()) < 1e-11, errors


def on_rank_in_all_ways(*args, **kwargs) -> list[dict[str, float]]:
    return [on_rank(native, normed, *args, **kwargs) for native in (False, True) for normed in (False, True)]


@pytest.mark.parametrize(
    ("size", "blocks", "block_in", "block_out", "ghosts"),
    [
        *((1, 8, 3, 7, 2), (2, 4, 5, 5, 2), (2, 8, 3, 7, 2)),
        *((4, 4, 3, 7, 2), (4, 8, 5, 5, 2), (8, 8, 3, 7, 2)),
        # More ranks than blocks.
        *((4, 2, 4, 4, 2), (6, 3, 4, 6, 4), (6, 2, 3, 9, 3), (8, 4, 6, 2, 4), (8, 2, 4, 8, 4)),
    ],
)
def test_output_and_gradients_equal_dense_on_real_ranks(ranks, size, blocks, block_in, block_out, ghosts):
    for actual in ranks(size)(on_rank_in_all_ways, blocks, block_in, block_out, ghosts, rows=(2, 3)):
        assert max(max(errors.values()) for errors in actual) < 1e-11, actual


def test_comparison_fails_where_a_source_is_swapped():
    """The assertion above can fail: with two decompressors exchanged the error is of order one."""
    reference = Phantom.random(4, 5, 5, 2)
    expected = reference.expected()["z"]
    reference.D[0][1], reference.D[0][2] = reference.D[0][2], reference.D[0][1]
    assert relative_error(phantom_linear(*weights_and_input(reference), blocks=4), expected) > 1e-2


def weights_and_input(reference: Phantom) -> list[torch.Tensor]:
    return [t.clone().requires_grad_() for t in (reference.x, *reference.packed().values())]


def test_gradcheck_and_gradgradcheck():
    reference = Phantom.random(3, 2, 3, 2, rows=(2,))
    inputs = weights_and_input(reference)

    def function(*tensors):
        return phantom_linear(*tensors, blocks=3)

    assert torch.autograd.gradcheck(function, inputs, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, inputs)


def double_backward(blocks: int, normed: bool) -> str:
    group = group_of(blocks, native=False)
    reference = Phantom.random(blocks, 4, 6, 2, rows=(2,))
    own = [t.chunk(group.size)[group.rank].clone().requires_grad_() for t in reference.packed().values()]
    x = reference.x.chunk(group.size, -1)[group.rank].clone().requires_grad_()
    if normed:
        z = phantom_linear(x, *own, norm=torch.ones_like(x[0]), eps=1e-5, blocks=blocks, group=group)
    else:
        z = phantom_linear(x, *own, blocks=blocks, group=group)
    with pytest.raises(RuntimeError) as caught:
        torch.autograd.grad((z**2).sum(), x, create_graph=True)
    return str(caught.value)


@with_and_without_norm
@pytest.mark.parametrize(("size", "blocks"), [(2, 4), (4, 2)], ids=["one_level", "two_levels"])
def test_second_derivatives_across_ranks_are_refused_rather_than_wrong(ranks, size, blocks, normed):
    assert all("one process only" in text for text in ranks(size)(double_backward, blocks, normed))


@pytest.mark.parametrize(
    ("size", "blocks", "normed"),
    [
        *((64, 128, False), (64, 16, False), (64, 16, True)),
        *(pytest.param(256, *case, marks=pytest.mark.slow) for case in ((256, False), (64, False), (64, True))),
    ],
)
def test_hundreds_of_simulated_ranks_equal_dense(size, blocks, normed):
    """Real numbers on every rank in one process: torch's LocalTensor mode over a fake process group."""
    inside = max(1, size // blocks)
    reference = Phantom.random(blocks, 2 * inside, 3 * inside, inside, rows=(3,))
    inputs, expected = inputs_of(reference, normed), expected_of(reference, normed)  # in the mode, ranks draw others
    with simulated_ranks(size) as (mode, world):

        def share(t: torch.Tensor, dim: int) -> torch.Tensor:
            return mode.rank_map(lambda r: t.chunk(size, dim)[r].clone())

        actual = results(inputs, reference, simulated_levels(world, blocks), share)
        parts = {name: [t._local_tensors[r] for r in range(size)] for name, t in actual.items()}
    for name, pieces in parts.items():
        assert relative_error(torch.cat(pieces, -1 if name in "zx" else 0), expected[name]) < 1e-12, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precisions_are_close(dtype):
    reference = Phantom.random(4, 16, 16, 4)
    expected = reference.expected()
    inputs = [t.detach().to(dtype).requires_grad_() for t in weights_and_input(reference)]
    z = phantom_linear(*inputs, blocks=4)
    z.backward(reference.d.to(dtype))
    assert z.dtype == dtype
    bound = 50 * torch.finfo(dtype).eps
    assert relative_error(z, expected["z"]) < bound
    for name, tensor in zip(("x", *NAMES), inputs, strict=True):
        assert tensor.grad.dtype == dtype
        assert relative_error(tensor.grad, expected[name]) < bound, name


def test_autocast_computes_in_its_dtype_and_returns_gradients_in_the_weights_dtype():
    reference = Phantom.random(4, 16, 16, 4)
    inputs = [t.detach().float().requires_grad_() for t in weights_and_input(reference)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = phantom_linear(*inputs, blocks=4)
    assert z.dtype == torch.bfloat16
    z.backward(reference.d.bfloat16())
    expected = reference.expected()
    for name, tensor in zip(("x", *NAMES), inputs, strict=True):
        assert tensor.grad.dtype == torch.float32
        assert relative_error(tensor.grad, expected[name]) < 0.1, name
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert phantom_linear(*weights_and_input(reference), blocks=4).dtype == torch.float64  # is left alone


def test_backward_keeps_x_and_the_gathered_ghosts_and_no_more():
    reference = Phantom.random(4, 16, 16, 3, rows=(10,))
    inputs = weights_and_input(reference)
    weights = {t.data_ptr() for t in inputs[1:]}
    kept: dict[int, int] = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in weights:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes() // 8
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        phantom_linear(*inputs, blocks=4)
    assert sorted(kept.values()) == sorted([10 * 4 * 16, 10 * 4 * 3])


def test_expanded_output_gradient():
    """sum() hands backward a gradient of stride 0."""
    reference = Phantom.random(4, 3, 3, 2)
    reference.d = torch.ones_like(reference.d)
    inputs = weights_and_input(reference)
    phantom_linear(*inputs, blocks=4).sum().backward()
    for name, tensor in zip(("x", *NAMES), inputs, strict=True):
        assert relative_error(tensor.grad, reference.expected()[name]) < 1e-12, name


def dense(x, local, compress, decompress, bias, blocks: int) -> torch.Tensor:
    """The map through the dense weight W_ii = L_i, W_ij = D_ij C_j, from torch's own differentiable functions."""
    p, k = blocks, compress.shape[0] // blocks
    L, C, D = local.chunk(p), compress.chunk(p), decompress.chunk(p)
    rows = []
    for i in range(p):
        steps = [(j - i) % p - 1 for j in range(p)]
        rows.append(
            torch.cat([L[i] if j == i else D[i][:, s * k : (s + 1) * k] @ C[j] for j, s in enumerate(steps)], 1)
        )
    return torch.nn.functional.linear(x, torch.cat(rows), bias)


def jvp_by_dual_numbers(function, tensors, tangents) -> torch.Tensor:
    with torch.autograd.forward_ad.dual_level(), torch.no_grad():
        duals = [torch.autograd.forward_ad.make_dual(t, v) for t, v in zip(tensors, tangents, strict=True)]
        return torch.autograd.forward_ad.unpack_dual(function(*duals)).tangent


def tangents(t):
    return tuple(torch.full_like(tensor, 0.3) for tensor in t)


def ensemble(t):
    return [
        torch.stack([tensor, 2 * tensor, -tensor], -1) for tensor in t
    ]  # stacked on the last dimension: strided in each


OVER_X = (0, None, None, None, None)
TRANSFORMS = {
    "grad": lambda f, t: torch.func.grad(lambda *t: f(*t).sin().sum(), argnums=(0, 1, 2, 3, 4))(*t),
    "vmap over inputs": lambda f, t: torch.vmap(f, OVER_X)(*t),
    "vmap over weights": lambda f, t: torch.vmap(f, -1)(*ensemble(t)),
    "gradients by sample": lambda f, t: torch.vmap(torch.func.grad(lambda w, row: f(row, *w).sin().sum()), (None, 0))(
        t[1:], t[0]
    ),
    "jvp": lambda f, t: torch.func.jvp(f, t, tangents(t)),
    "dual numbers": lambda f, t: jvp_by_dual_numbers(f, t, tangents(t)),
    "hessian": lambda f, t: torch.func.hessian(lambda c: f(t[0], t[1], c, *t[3:]).sin().sum())(t[2]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_equal_those_of_the_dense_map(transform):
    inputs = tuple(t.detach() for t in weights_and_input(Phantom.random(3, 2, 3, 2, rows=(4,))))
    actual, expected = (
        TRANSFORMS[transform](f, inputs)
        for f in (lambda *t: phantom_linear(*t, blocks=3), lambda *t: dense(*t, blocks=3))
    )
    for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (actual, expected)), strict=True):
        assert relative_error(a, b) < 1e-12


def transforms_across_ranks() -> list[str]:
    group = rank_group(init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    reference = Phantom.random(4, 3, 3, 2, rows=(2,))
    own = [t.chunk(group.size)[group.rank] for t in reference.packed().values()]
    x = reference.x.chunk(group.size, -1)[group.rank]

    def function(x):
        return phantom_linear(x, *own, blocks=4, group=group)

    calls = (
        lambda: torch.func.grad(lambda x: function(x).sum())(x),
        lambda: torch.vmap(function)(x),
        lambda: torch.func.jvp(function, (x,), (x,)),
        lambda: torch.autograd.functional.jacobian(function, x, vectorize=True),
    )
    texts = []
    for call in calls:
        with pytest.raises(RuntimeError) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_transforms_across_ranks_are_refused(ranks):
    for texts in ranks(2)(transforms_across_ranks):
        assert all("supported in one process only" in text for text in texts), texts


def test_inputs_on_another_device_and_complex_dtypes_are_refused():
    inputs = weights_and_input(Phantom.random(2, 3, 3, 1))
    with pytest.raises(ValueError, match="the input is on meta and the weights are on cpu"):
        phantom_linear(inputs[0].to("meta"), *inputs[1:], blocks=2)
    with pytest.raises(ValueError, match=r"complex dtypes are not supported, got torch\.complex128"):
        phantom_linear(*[t.to(torch.complex128) for t in inputs], blocks=2)
