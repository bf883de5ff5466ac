"""Maps in two parts: results and gradients are those of the whole maps, to the bit, and halves alternate both ways."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel.ops import SINGLE_RANK, RankGroup, phantom_linear
from phantom_parallel.ops.collectives import rank_group
from phantom_parallel.ops.head import begin_rows, end_rows, row_logits
from phantom_parallel.ops.linear import begin_phantom, end_phantom
from tests.ops.test_exchange import Exchanges
from tests.reference import Phantom

EPS = 0.03


def inputs_of(reference: Phantom, group: RankGroup, normed: bool, x: torch.Tensor) -> list[torch.Tensor]:
    """x, the norm or the bias, and the weights of this rank."""
    packed = reference.packed()
    norm = torch.linspace(0.5, 1.5, x.shape[-1], dtype=torch.float64)
    extra = norm if normed else packed["bias"]
    whole = [extra, packed["local"], packed["compress"], packed["decompress"]]
    parts = [x.chunk(group.size, -1)[group.rank], *(t.chunk(group.size)[group.rank] for t in whole)]
    return [t.clone().requires_grad_() for t in parts]


def in_one(inputs: list[torch.Tensor], group: RankGroup, normed: bool) -> torch.Tensor:
    x, extra, *weights = inputs
    if normed:
        return phantom_linear(x, *weights, norm=extra, eps=EPS, blocks=4, group=group)
    return phantom_linear(x, *weights, extra, blocks=4, group=group)


def in_two(halves: list[list[torch.Tensor]], group: RankGroup, normed: bool) -> list[torch.Tensor]:
    where = {"blocks": 4, "group": group}
    begun = [begin_phantom(x, e if normed else None, local, c, **where) for x, e, local, c, _ in halves]
    return [
        end_phantom(started, half[4], None if normed else half[1], eps=EPS if normed else None, **where)
        for started, half in zip(begun, halves, strict=True)
    ]


def differs(wire: str, normed: bool, native: bool) -> list[str]:
    """Names of results that are not those of the whole map, for each half of the rows."""
    group = SINGLE_RANK
    if torch.distributed.is_initialized():
        group = rank_group(init_device_mesh("cpu", (torch.distributed.get_world_size(),)), wire)
        group = group._replace(native=native or group.native)
    reference = Phantom.random(4, 5, 4, 3, rows=(6,))
    halves = [inputs_of(reference, group, normed, x) for x in reference.x.chunk(2)]
    whole = [[t.detach().clone().requires_grad_() for t in half] for half in halves]
    ds = [d.chunk(group.size, -1)[group.rank] for d in reference.d.chunk(2)]
    actual, expected = in_two(halves, group, normed), [in_one(half, group, normed) for half in whole]
    torch.autograd.backward(actual, ds)
    torch.autograd.backward(expected, ds)
    wrong = []
    for index in range(2):
        pairs = [(actual[index], expected[index])]
        pairs += [(a.grad, b.grad) for a, b in zip(halves[index], whole[index], strict=True)]
        wrong += [
            f"{name} of half {index}"
            for name, (a, b) in zip(("z", "x", "extra", "local", "compress", "decompress"), pairs, strict=True)
            if not torch.equal(a, b)
        ]
    return wrong


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("wire", "native"), [("full", False), ("full", True), ("int8", False)])
def test_two_parts_equal_the_whole_map_on_ranks(ranks, wire, native, normed):
    assert ranks(2)(differs, wire, normed, native) == [[], []]


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_two_parts_equal_the_whole_map_on_one_process(normed):
    assert differs("full", normed, False) == []


def rows_differ() -> bool:
    group = rank_group(init_device_mesh("cpu", (2,)))
    generator = torch.Generator().manual_seed(1)
    shapes = (2, 4, 8), (8,), (12, 16), (4, 12)
    *drawn, d = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    results = []
    for split in (True, False):
        x, norm, weight = (t.clone().requires_grad_() for t in drawn)
        if split:
            logits = end_rows(begin_rows(x, norm, group=group), weight, eps=EPS, group=group)
        else:
            logits = row_logits(x, norm, weight, eps=EPS, group=group)
        logits.backward(d)
        results.append([logits.detach(), x.grad, norm.grad, weight.grad])
    return not all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_head_by_rows_in_two_parts_equals_the_whole(ranks):
    assert ranks(2)(rows_differ) == [False, False]


def order_of(normed: bool) -> tuple[list[str], list[str]]:
    group = rank_group(init_device_mesh("cpu", (2,)))
    reference = Phantom.random(4, 5, 4, 3, rows=(6,))
    halves = [inputs_of(reference, group, normed, x) for x in reference.x.chunk(2)]
    with Exchanges() as forward:
        results = in_two(halves, group, normed)
    total = sum(z.sum() for z in results)
    with Exchanges() as backward:
        total.backward()
    return forward.order, backward.order


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_halves_alternate_in_both_directions(ranks, normed):
    """Both exchanges start before either is waited for, with the products of the other half in between."""
    for orders in ranks(2)(order_of, normed):
        for order in orders:
            starts = [i for i, name in enumerate(order) if name == "all_to_all_single"]
            waits = [i for i, name in enumerate(order) if name == "wait_tensor"]
            assert len(starts) == len(waits) == 2
            assert starts[0] < starts[1] < waits[0] < waits[1]
            assert "product" in order[starts[0] : starts[1]]
            assert "product" in order[waits[0] : waits[1]]


def twice() -> str:
    group = rank_group(init_device_mesh("cpu", (2,)))
    reference = Phantom.random(4, 5, 4, 3, rows=(6,))
    half = inputs_of(reference, group, False, reference.x)
    (z,) = in_two([half], group, False)
    with pytest.raises(RuntimeError) as caught:
        torch.autograd.grad(z.square().sum(), half[0], create_graph=True)
    return str(caught.value)


def test_second_derivatives_are_refused_rather_than_wrong(ranks):
    assert all("cannot be differentiated twice" in text for text in ranks(2)(twice))
