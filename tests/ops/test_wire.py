"""Features in short formats on the wire, against float64 maths that rounds in the same places.

The references are written from the definitions, in numpy, and share no code with the operators.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel.ops import SINGLE_RANK, RankGroup, gather_features, phantom_linear, shard_features, tensor_linear
from phantom_parallel.ops.collectives import block_group, rank_group
from phantom_parallel.ops.head import vocabulary_logits
from phantom_parallel.ops.tensor import column_linear, row_embedding, row_linear
from phantom_parallel.ops.wire import decode, decode_exact, encode
from tests.reference import Phantom, relative_error

EPS = 0.03


def rounded(x: np.ndarray, wire: str) -> np.ndarray:
    """What arrives of rows x (..., c)."""
    if wire == "bf16":
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
        kept = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16  # to nearest, ties to even
        return kept.astype(np.uint32).view(np.float32).astype(np.float64)
    scale = np.float32(np.abs(x).max(-1, keepdims=True) / 127).astype(np.float64)
    return np.rint(x / np.where(scale == 0, 1, scale)) * scale


def group_of(wire: str, native: bool = False) -> RankGroup:
    group = rank_group(init_device_mesh("cpu", (torch.distributed.get_world_size(),)), wire)
    return group._replace(native=native or group.native)


def run(function, inputs: dict[str, np.ndarray], d: np.ndarray) -> dict[str, torch.Tensor]:
    """The result z for an output gradient d, and the gradients of the inputs that have some."""
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in inputs.items()}
    for tensor in tensors.values():
        tensor.requires_grad_(tensor.is_floating_point())
    z = function(**tensors)
    z.backward(torch.from_numpy(np.array(d)))
    return {"z": z.detach()} | {name: t.grad for name, t in tensors.items() if t.grad is not None}


def errors_of(actual: dict[str, torch.Tensor], expected: dict[str, np.ndarray]) -> dict[str, float]:
    assert actual.keys() == expected.keys()
    return {name: relative_error(actual[name], torch.from_numpy(np.array(expected[name]))) for name in expected}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wire", ["bf16", "int8"])
@given(rows=st.integers(0, 5), columns=st.integers(1, 70), size=st.integers(-20, 20), seed=st.integers(0, 99))
def test_the_codec_equals_its_equations(wire, dtype, rows, columns, size, seed):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, columns, generator=generator, dtype=torch.float64) * 2.0**size).to(dtype)
    sums = x.to(torch.promote_types(dtype, torch.float32)).square().sum(1, keepdim=True)
    message = encode(x, wire, sums)
    scale = 4 if wire == "int8" else 0
    assert message.element_size() * message.shape[1] == columns * (1 if scale else 2) + scale + sums.element_size()
    assert torch.equal(decode_exact(message, wire, columns, sums.dtype), sums)
    actual = decode(message, wire, columns, dtype)
    assert actual.dtype == dtype
    expected = torch.from_numpy(rounded(x.double().numpy(), wire)).to(dtype) if rows else x
    if wire == "int8" and dtype == torch.float32:  # computed in float32: a quotient may round to the other neighbour
        step = x.abs().amax(1, keepdim=True) / 127 if rows else x
        assert ((actual - x).abs() <= 0.50001 * step).all()
        assert ((actual - expected).abs() <= 1.00001 * step).all()
    else:
        assert relative_error(actual, expected) < (1e-15 if dtype == torch.float64 else 1e-2)


def test_rows_of_zeros_and_rows_that_are_not_finite():
    x = torch.zeros(4, 3)
    x[1, 1], x[2, 0], x[3, 2] = torch.nan, torch.inf, -1e-42  # the last is smaller than the smallest scale
    actual = decode(encode(x, "int8"), "int8", 3, torch.float32)
    assert torch.equal(actual[0], torch.zeros(3))
    assert actual[1:3].isnan().all()
    assert (actual[3] - x[3]).abs().max() < 1e-38


def expected_phantom(reference: Phantom, group: RankGroup, wire: str, norm: np.ndarray | None) -> dict[str, np.ndarray]:
    """Output and gradients of rank ``group.rank``, from the blocks of all ranks."""
    p, held = reference.blocks, reference.blocks // group.size
    owner = [j // held for j in range(p)]
    L, C = [t.numpy() for t in reference.L], [t.numpy() for t in reference.C]
    D = [[None if t is None else t.numpy() for t in row] for row in reference.D]
    x, d = np.split(reference.x.numpy(), p, -1), np.split(reference.d.numpy(), p, -1)
    w = np.split(np.ones(reference.x.shape[-1]) if norm is None else norm, p)
    n, r = reference.x.shape[-1], np.ones((len(x[0]), 1))
    if norm is not None:
        r = (np.square(reference.x.numpy()).mean(-1, keepdims=True) + EPS) ** -0.5
    u = [w[j] * x[j] for j in range(p)]
    g = []
    for rank in range(group.size):
        sent = rounded(np.concatenate([u[j] @ C[j].T for j in range(p) if owner[j] == rank], 1), wire)
        g += np.split(sent, held, 1)
    own = [j for j in range(p) if owner[j] == group.rank]
    y = [r * (u[i] @ L[i].T + sum(g[j] @ D[i][j].T for j in range(p) if j != i)) for i in range(p)]
    h = 0
    for rank in range(group.size):
        part = [sum(d[i] @ D[i][j] for i in range(p) if owner[i] == rank and i != j) + 0 * g[j] for j in own]
        h = h + rounded(np.concatenate(part, 1), wire)
    h = dict(zip(own, np.split(h, held, 1), strict=True))
    du = {j: d[j] @ L[j] + h[j] @ C[j] for j in own}
    t = sum((d[i] * y[i]).sum(1, keepdims=True) for i in range(p)) if norm is not None else 0
    ring = {i: [(i + step) % p for step in range(1, p)] for i in own}
    actual = {
        "z": np.concatenate([y[i] for i in own], 1),
        "x": np.concatenate([r * (w[j] * du[j] - r * x[j] * t / n) for j in own], 1),
        "local": np.concatenate([d[i].T @ (r * u[i]) for i in own]),
        "compress": np.concatenate([h[j].T @ (r * u[j]) for j in own]),
        "decompress": np.concatenate([np.concatenate([d[i].T @ (r * g[j]) for j in ring[i]], 1) for i in own]),
    }
    if norm is None:
        return actual | {"bias": np.concatenate([d[i].sum(0) for i in own])}
    return actual | {"norm": np.concatenate([(r * x[j] * du[j]).sum(0) for j in own])}


def phantom_errors(wire: str, native: bool, blocks: int, normed: bool) -> dict[str, float]:
    group = group_of(wire, native)
    reference = Phantom.random(blocks, 5, 4, 3, rows=(6,))
    if not normed:
        reference.bias.zero_()
    norm = 1 + 0.4 * np.random.default_rng(7).standard_normal(reference.x.shape[-1]) if normed else None

    def share(t, dim=0) -> np.ndarray:
        return np.split(np.asarray(t), group.size, dim)[group.rank]

    inputs = {"x": share(reference.x, -1)} | {name: share(t) for name, t in reference.packed().items()}
    if normed:
        del inputs["bias"]
        inputs["norm"] = share(norm)
    where = {"eps": EPS if normed else None, "blocks": blocks, "group": group}
    actual = run(lambda **given: phantom_linear(**given, **where), inputs, share(reference.d, -1))
    return errors_of(actual, expected_phantom(reference, group, wire, norm))


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("wire", ["bf16", "int8"])
@pytest.mark.parametrize(("size", "blocks", "native"), [(2, 4, False), (4, 4, True)])
def test_phantom_maps_equal_float64_maths_that_rounds_what_travels(ranks, size, blocks, native, wire, normed):
    for errors in ranks(size)(phantom_errors, wire, native, blocks, normed):
        assert max(errors.values()) < 1e-11, errors


def draw(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    generator = np.random.default_rng(3)
    return [generator.standard_normal(shape) for shape in shapes]


def tensor_errors(wire: str, native: bool) -> dict[str, float]:
    group = group_of(wire, native)
    r, size = group.rank, group.size
    x, weight, bias, d = draw((6, 16), (8, 16), (8,), (6, 8))
    xs, ds, ws = np.split(x, size, 1), np.split(d, size, 1), np.split(weight, size, 0)
    seen = np.concatenate([xs[s] if s == r else rounded(xs[s], wire) for s in range(size)], 1)
    expected = {
        "z": seen @ ws[r].T + np.split(bias, size)[r],
        "x": sum(rounded(ds[s] @ np.split(ws[s], size, 1)[r], wire) for s in range(size)),
        "weight": ds[r].T @ seen,
        "bias": ds[r].sum(0),
    }
    inputs = {"x": xs[r], "weight": ws[r], "bias": np.split(bias, size)[r]}
    return errors_of(run(lambda **given: tensor_linear(**given, group=group), inputs, ds[r]), expected)


def summed(parts: list[np.ndarray], wire: str) -> np.ndarray:
    """An all-reduce: the slice of each rank is rounded, summed by its owner, and rounded again."""
    size = len(parts)
    slices = [sum(rounded(np.split(part, size, 1)[s], wire) for part in parts) for s in range(size)]
    return np.concatenate([rounded(piece, wire) for piece in slices], 1)


def megatron_errors(wire: str, native: bool) -> dict[str, float]:
    group = group_of(wire, native)
    r, size = group.rank, group.size
    x, weight, bias, d = draw((6, 16), (8, 16), (8,), (6, 8))
    ds, ws = np.split(d, size, 1), np.split(weight, size, 0)
    inputs = {"x": x, "weight": ws[r], "bias": np.split(bias, size)[r]}
    actual = run(lambda **given: column_linear(**given, group=group), inputs, ds[r])
    expected = {
        "z": x @ ws[r].T + np.split(bias, size)[r],
        "x": summed([ds[s] @ ws[s] for s in range(size)], wire),
        "weight": ds[r].T @ x,
        "bias": ds[r].sum(0),
    }
    errors = {f"column {name}": error for name, error in errors_of(actual, expected).items()}

    xs, ws = np.split(x, size, 1), np.split(weight, size, 1)
    inputs = {"x": xs[r], "weight": np.ascontiguousarray(ws[r]), "bias": bias}
    actual = run(lambda **given: row_linear(**given, group=group), inputs, d)
    expected = {
        "z": summed([xs[s] @ ws[s].T for s in range(size)], wire) + bias,
        "x": d @ ws[r],
        "weight": d.T @ xs[r],
        "bias": d.sum(0),
    }
    errors |= {f"row {name}": error for name, error in errors_of(actual, expected).items()}

    tokens, table = np.array([[3, 0, 7], [5, 5, 1]]), draw((8, 16))[0]
    tables = np.split(table, size)
    first, held = r * len(tables[r]), len(tables[r])
    d = draw((2, 3, 16))[0]
    actual = run(lambda **given: row_embedding(**given, group=group), {"tokens": tokens, "weight": tables[r]}, d)
    parts = [
        np.where(((tokens >= s * held) & (tokens < (s + 1) * held))[..., None], table[tokens], 0).reshape(6, 16)
        for s in range(size)
    ]
    gradient = np.zeros((8, 16))
    np.add.at(gradient, tokens.ravel(), d.reshape(6, 16))
    expected = {"z": summed(parts, wire).reshape(2, 3, 16), "weight": gradient[first : first + held]}
    return errors | {f"embedding {name}": error for name, error in errors_of(actual, expected).items()}


def feature_errors(wire: str, native: bool) -> dict[str, float]:
    group = group_of(wire, native)
    r, size = group.rank, group.size
    x, d, norm = draw((6, 16), (6, 16), (16,))
    xs, ns = np.split(x, size, 1), np.split(norm, size)
    parts = [(s + 1) * d for s in range(size)]  # the gradient that each rank has
    back = sum(rounded(np.split(part, size, 1)[r], wire) for part in parts)
    actual = run(lambda x: gather_features(x, group, partial_grad=True), {"x": xs[r]}, parts[r])
    expected = {"z": np.concatenate([rounded(piece, wire) for piece in xs], 1), "x": back}
    errors = {f"gather {name}": error for name, error in errors_of(actual, expected).items()}

    actual = run(lambda x: shard_features(x, group), {"x": x}, np.split(d, size, 1)[r])
    expected = {"z": xs[r], "x": np.concatenate([rounded(piece, wire) for piece in np.split(d, size, 1)], 1)}
    errors |= {f"shard {name}": error for name, error in errors_of(actual, expected).items()}

    identity = torch.eye(16, dtype=torch.float64)  # as the head's weight: its logits are the gathered features
    inputs = {"x": xs[r], "norm": ns[r]}
    actual = run(lambda x, norm: vocabulary_logits(x, norm, identity, eps=EPS, group=group), inputs, parts[r])
    rms = (np.square(x).mean(1, keepdims=True) + EPS) ** -0.5
    y = rms * np.concatenate([rounded(ns[s] * xs[s], wire) for s in range(size)], 1)
    t = sum((part * y).sum(1, keepdims=True) for part in parts)
    expected = {"z": y, "x": rms * (ns[r] * back - rms * xs[r] * t / 16), "norm": (rms * xs[r] * back).sum(0)}
    return errors | {f"normed {name}": error for name, error in errors_of(actual, expected).items()}


@pytest.mark.parametrize("wire", ["bf16", "int8"])
@pytest.mark.parametrize(("size", "native"), [(2, False), (4, True)])
def test_the_other_maps_equal_float64_maths_that_rounds_what_travels(ranks, size, native, wire):
    for function in (tensor_errors, megatron_errors, feature_errors):
        for errors in ranks(size)(function, wire, native):
            assert max(errors.values()) < 1e-11, errors


def two_level_errors(wire: str) -> dict[str, float]:
    """Two ranks in each of two blocks, against the maths of the blocks with what each rank sends rounded."""
    mesh = init_device_mesh("cpu", (4,))
    group = block_group(mesh, 2, wire)
    p, t, (i, s) = 2, 2, divmod(group.rank, 2)
    reference = Phantom.random(p, 6, 4, 2, rows=(5,))
    reference.bias.zero_()
    L, C = [w.numpy() for w in reference.L], [w.numpy() for w in reference.C]
    D = [reference.D[0][1].numpy(), reference.D[1][0].numpy()]  # of block i, from the other
    x, d = np.split(reference.x.numpy(), p, -1), np.split(reference.d.numpy(), p, -1)

    def part(w: np.ndarray, place: int, dim: int = 0) -> np.ndarray:
        return np.split(w, t, dim)[place]

    def seen(block: int, place: int) -> np.ndarray:
        parts = [part(x[block], index, 1) for index in range(t)]
        return np.concatenate([p if index == place else rounded(p, wire) for index, p in enumerate(parts)], 1)

    g = [
        [rounded(rounded(seen(j, place) @ part(C[j], place).T, wire), wire) for place in range(t)] for j in range(p)
    ]  # across, then inside
    other = 1 - i
    ghosts = np.concatenate(g[other], 1)
    partial = [[part(d[b], place, 1) @ part(D[b], place) for place in range(t)] for b in range(p)]
    # of block j, by place: summed inside the other block, rounded, and rounded again on its way across
    h = [
        [
            rounded(sum(rounded(part(piece, place, 1), wire) for piece in partial[1 - j]), wire) + 0 * g[j][place]
            for place in range(t)
        ]
        for j in range(p)
    ]
    dxs = [part(d[i], place, 1) @ part(L[i], place) + h[i][place] @ part(C[i], place) for place in range(t)]
    expected = {
        "z": seen(i, s) @ part(L[i], s).T + ghosts @ part(D[i], s).T,
        "x": sum(rounded(part(piece, s, 1), wire) for piece in dxs),
        "local": part(d[i], s, 1).T @ seen(i, s),
        "compress": h[i][s].T @ seen(i, s),
        "decompress": part(d[i], s, 1).T @ ghosts,
    }
    inputs = {"x": part(x[i], s, 1), "local": part(L[i], s), "compress": part(C[i], s), "decompress": part(D[i], s)}
    actual = run(lambda **given: phantom_linear(**given, blocks=p, group=group), inputs, part(d[i], s, 1))
    return errors_of(actual, expected)


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_two_levels_equal_float64_maths_that_rounds_what_travels(ranks, wire):
    for errors in ranks(4)(two_level_errors, wire):
        assert max(errors.values()) < 1e-6, errors  # scales of what is rounded twice are float32


def test_one_rank_rounds_nothing():
    reference = Phantom.random(4, 5, 4, 3)
    inputs = [reference.x, *reference.packed().values()]
    group = SINGLE_RANK._replace(wire="int8")
    assert torch.equal(phantom_linear(*inputs, blocks=4, group=group), phantom_linear(*inputs, blocks=4))
