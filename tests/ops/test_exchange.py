"""What is sent: the collectives of a running layer, counted by op, number and bytes, against the formula."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from phantom_parallel.ops import phantom_linear, tensor_linear
from phantom_parallel.ops.collectives import make_levels, rank_group

ROWS, BLOCK_IN, BLOCK_OUT, GHOSTS = 6, 8, 4, 2


class Exchanges(TorchDispatchMode):
    """Every functional collective that starts, and the order of starts, matrix products and waits."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []
        self.order: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if func.namespace == "_c10d_functional":
            self.order.append(name)
            if name != "wait_tensor":
                self.sent.append((name, args[0].numel() * args[0].element_size()))
        elif name in ("mm", "bmm", "addmm", "baddbmm"):
            self.order.append("product")
        return func(*args, **(kwargs or {}))


def exchange(strategy: str, blocks: int, native: bool, needs: str) -> dict[str, list]:
    ranks = rank_group(init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    ranks = ranks._replace(native=native)
    held = blocks // ranks.size
    shapes = {
        "x": (ROWS, held * BLOCK_IN),
        "local": (held * BLOCK_OUT, BLOCK_IN),
        "compress": (held * GHOSTS, BLOCK_IN),
        "decompress": (held * BLOCK_OUT, (blocks - 1) * GHOSTS),
        "weight": (held * BLOCK_OUT, blocks * BLOCK_IN),
    }
    names = ("x", "local", "compress", "decompress") if strategy == "phantom" else ("x", "weight")
    tensors = [torch.randn(shapes[name]).requires_grad_(needs == "all" or name in needs.split()) for name in names]
    with Exchanges() as forward, FlopCounterMode(display=False) as forward_flops:
        z = (
            phantom_linear(*tensors, blocks=blocks, group=ranks)
            if strategy == "phantom"
            else tensor_linear(*tensors, group=ranks)
        )
    with Exchanges() as backward, FlopCounterMode(display=False) as backward_flops:
        z.sum().backward()
    assert [t.grad is not None for t in tensors] == [t.requires_grad for t in tensors]
    return {
        "forward": forward.sent,
        "backward": backward.sent,
        "forward order": forward.order,
        "backward order": backward.order,
        "flops": [forward_flops.get_total_flops(), backward_flops.get_total_flops()],
    }


@pytest.mark.parametrize(
    ("strategy", "size", "blocks", "words"),
    [*(("phantom", size, blocks, blocks // size * GHOSTS) for size in (2, 4) for blocks in (size, 8)),
     *(("tensor", size, size, BLOCK_IN) for size in (2, 4))],
)  # fmt: skip
def test_ghosts_or_activations_are_sent_once_each_way(ranks, strategy, size, blocks, words):
    for actual in ranks(size)(exchange, strategy, blocks, True, "all"):
        assert actual["forward"] == [("all_gather_into_tensor", 4 * ROWS * words)]
        assert actual["backward"] == [("reduce_scatter_tensor", 4 * ROWS * words * size)]
    for actual in ranks(size)(exchange, strategy, blocks, False, "all"):  # of which each rank keeps one of its parts
        assert actual["forward"] == actual["backward"] == [("all_to_all_single", 4 * ROWS * words * size)]


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("strategy", ["phantom", "tensor"])
def test_exchange_starts_before_the_local_products_and_is_waited_for_after_them(ranks, strategy, native):
    for actual in ranks(2)(exchange, strategy, 2, native, "all"):
        for phase in ("forward order", "backward order"):
            order = actual[phase]
            (start,) = [i for i, name in enumerate(order) if name not in ("product", "wait_tensor")]
            assert "product" in order[start : order.index("wait_tensor")], order


@pytest.mark.parametrize(
    ("strategy", "size", "blocks"),
    [("phantom", 1, 4), ("phantom", 2, 2), ("phantom", 2, 8), ("phantom", 4, 4), ("tensor", 1, 1), ("tensor", 4, 4)],
)
def test_multiply_adds_equal_the_formula(ranks, strategy, size, blocks):
    """torch's own counter on a rank: every weight once a row forward, twice backward."""
    weights = blocks // size * (BLOCK_OUT * BLOCK_IN + GHOSTS * BLOCK_IN + (blocks - 1) * GHOSTS * BLOCK_OUT)
    if strategy == "tensor":
        weights = BLOCK_OUT * size * BLOCK_IN
    for actual in ranks(size)(exchange, strategy, blocks, True, "all"):
        assert actual["flops"] == [2 * ROWS * weights, 4 * ROWS * weights]


# Which of h = D^T d, dL, dD, L^T d, dC and C^T h are needed, in multiply-adds a row: m_out (p-1) k twice, m_out m_in
# twice, k m_in twice.
L_PART, D_PART, C_PART = BLOCK_OUT * BLOCK_IN, GHOSTS * BLOCK_OUT, GHOSTS * BLOCK_IN


@pytest.mark.parametrize(
    ("strategy", "needs", "sends", "products"),
    [
        ("phantom", "x", True, D_PART + L_PART + C_PART),
        ("phantom", "local", False, L_PART),
        ("phantom", "decompress", False, D_PART),
        ("phantom", "compress", True, D_PART + C_PART),
        ("phantom", "local decompress", False, L_PART + D_PART),
        ("phantom", "x local compress", True, D_PART + 2 * L_PART + 2 * C_PART),
        ("tensor", "x", True, 2 * L_PART),
        ("tensor", "weight", False, 2 * L_PART),
    ],
)
def test_nothing_is_computed_or_sent_for_what_needs_no_gradient(ranks, strategy, needs, sends, products):
    for actual in ranks(2)(exchange, strategy, 2, True, needs):
        assert len(actual["backward"]) == sends
        assert actual["flops"][1] == 2 * ROWS * products


def timeouts_of_levels() -> list[float]:
    group = dist.new_group(timeout=timedelta(seconds=77))
    levels = make_levels(group, 1, "cpu")
    made = (_resolve_process_group(level.name) for level in (levels.inter_block, levels.intra_block))
    return [each._get_backend(torch.device("cpu")).options._timeout.total_seconds() for each in made]


def test_groups_of_two_levels_keep_the_timeout_of_the_group(ranks):
    assert ranks(2)(timeouts_of_levels) == [[77.0, 77.0]] * 2
