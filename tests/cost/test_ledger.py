"""The ledger on code of any kind."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from phantom_parallel.cost.ledger import Ledger


def test_a_small_network_by_hand():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    with Ledger() as ledger:
        model(x).sum().backward()
    assert ledger.flops_of("forward") == 2 * 3 * (4 * 8 + 8 * 2)
    assert ledger.flops_of("backward") == 2 * 3 * (4 * 8 + 2 * 8 * 2)
    assert ledger.flops_of("forward", "Sequential.0") == 2 * 3 * 4 * 8
    assert ledger.flops_of("backward", "Sequential.2") == 2 * 2 * 3 * 8 * 2
    assert ledger.flops == ledger.flops_of(module="Sequential")
    assert ledger.moved_bytes == 0


def test_every_spelling_of_a_product_is_counted():
    a, b, z = torch.randn(2, 3, 4), torch.randn(2, 4, 5), torch.zeros(2, 3, 5)
    with Ledger() as ledger:
        torch.bmm(a, b)
        z.baddbmm_(a, b)
        torch.baddbmm(z, a, b, out=z)
        torch.einsum("bij,bjk->bik", a, b)
        z[0].addmm_(a[0], b[0])
        a[0] @ b[0]
    assert ledger.flops == 4 * 2 * 2 * 60 + 2 * 2 * 60


def test_attention_is_counted_both_ways():
    """Q K^T and A V forward; backward computes Q K^T again and four products more."""
    q = torch.randn(2, 3, 5, 8, requires_grad=True)
    product = 2 * 2 * 3 * 5 * 5 * 8
    with Ledger() as ledger:
        nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
    assert ledger.flops_of("forward") == 2 * product
    assert ledger.flops_of("backward") == 5 * product


def test_inference_mode_is_counted_the_same():
    """There, operations that consist of others arrive whole."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2, bias=False))
    x, q = torch.randn(3, 4), torch.randn(2, 3, 5, 8)
    actual = []
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, Ledger() as ledger:
            model(x)
            torch.einsum("ij,kj->ik", x, x) @ x
            nn.functional.scaled_dot_product_attention(q, q, q)
        actual.append(ledger)
    assert actual[0].flops == actual[1].flops == 2 * (3 * 4 * 8 + 3 * 8 * 2 + 2 * 3 * 3 * 4) + 4 * 2 * 3 * 5 * 5 * 8
    assert actual[0].products == actual[1].products
    assert not torch.nn.modules.module._global_forward_hooks


def count_collectives() -> dict:
    t = torch.ones(10)
    with Ledger() as ledger:
        dist.all_reduce(t)
        dist.broadcast(t, 0)
        whole = torch.empty(10 * dist.get_world_size())
        dist.all_gather_single(whole, t)
        dist.reduce_scatter_single(t, whole)
        dist.all_to_all_single(torch.empty_like(whole), whole)
        dist.barrier()
    return ledger.to_dict()


def megatron() -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    pair = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    x = torch.randn(3, 8)
    with Ledger() as whole:
        pair(x).sum().backward()
    parallelize_module(pair, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    pair.zero_grad()
    with Ledger() as cut:
        pair(x).sum().backward()
    return whole.flops, cut.flops


def fully_sharded() -> dict[str, int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Linear(8, 8, bias=False)
    fully_shard(model, mesh=mesh)
    with Ledger() as ledger:
        model(torch.randn(2, 8)).sum().backward()
    return {e.op: e.moved for e in ledger.collectives}


def count_all() -> tuple[dict, tuple[int, int], dict[str, int]]:
    return count_collectives(), megatron(), fully_sharded()


def test_collectives_dtensors_and_fsdp2_are_counted_as_what_this_rank_does(ranks):
    """FSDP2 gathers the sharded weight and scatters its gradient: (R-1)/R of 8 x 8 words each."""
    expected = {"all_reduce": (40, 60), "broadcast": (40, 40), "all_gather": (40, 120), "reduce_scatter": (160, 120)}
    for collectives, (whole, cut), sharded in ranks(4)(count_all):
        entries = {e["op"]: (e["message"], e["moved"]) for e in collectives["collectives"]}
        assert entries == expected | {"all_to_all": (160, 120)}
        assert all(e["ranks"] == 4 and e["count"] == 1 for e in collectives["collectives"])
        assert collectives["moved_bytes"] == 60 + 40 + 3 * 120
        assert whole == 4 * cut
        assert sharded == {"all_gather": 3 * 64 * 4 // 4, "reduce_scatter": 3 * 64 * 4 // 4}
