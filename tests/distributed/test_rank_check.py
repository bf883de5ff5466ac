"""Ranks that differ raise the same error on every rank, which names the rank, the layer and the difference."""

import os
import subprocess
import sys
import time
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from phantom_parallel import GPT, GPTConfig, Ledger, PhantomLinear, RanksDisagree, TensorLinear
from phantom_parallel.distributed import rank_check
from phantom_parallel.distributed.data_parallel import average_gradients
from phantom_parallel.distributed.errors import PeerFailed
from phantom_parallel.distributed.launch import launch
from phantom_parallel.distributed.rank_check import check_ranks
from phantom_parallel.nn.megatron import column_style, row_style
from phantom_parallel.ops import collectives, gather_features
from tests.distributed import workers

RANKS = 3
PATIENCE = 2.0  # seconds: a test's stand-in for the timeout of the process group


class Net(nn.Module):
    """Three layers of the same shape between others."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        made = [PhantomLinear(12, 12, blocks=3, ghosts=2, mesh=mesh) for _ in range(3)]
        self.layers = nn.ModuleList([TensorLinear(12, 12, mesh=mesh), *made])
        self.order = list(range(4))

    def forward(self, x):
        for index in self.order:
            x = torch.relu(self.layers[index](x))
        return gather_features(x, self.mesh)


def mesh_of_all() -> DeviceMesh:
    return DeviceMesh("cpu", range(dist.get_world_size()), mesh_dim_names=("tp",))


def run(net: Net, odd: bool, case: str) -> None:
    """One step in which the odd rank differs in ``case``."""
    rows, dtype = (6 if odd and case == "batch" else 8), torch.float32
    if odd and case == "dtype":
        net, dtype = net.double(), torch.float64
    if odd and case == "skipped":
        net.order = [0, 1, 3]
    if odd and case == "skipped last":
        net.order = [0, 1, 2]
    if odd and case == "swapped":
        net.order = [0, 2, 1, 3]
    if odd and case == "frozen":
        net.layers[2].requires_grad_(False)
    if odd and case == "raises":
        raise ArithmeticError("no numbers today")
    x = torch.ones(rows, 4, dtype=dtype)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=odd and case == "autocast"),
        torch.set_grad_enabled(not (odd and case == "no_grad")),
    ):
        y = net(x)
    if odd and case == "no backward":
        return
    y.sum().backward()


def outcome(case: str, odd: int) -> tuple[str, str, float]:
    torch.manual_seed(0)
    mesh = mesh_of_all()
    net, started = Net(mesh), time.monotonic()
    patch = pytest.MonkeyPatch()
    if case == "sleeps":
        patch.setattr(rank_check, "timeout_of", lambda group: timedelta(seconds=PATIENCE))
    try:
        with check_ranks():
            run(net, dist.get_rank() == odd, case)
            if case == "sleeps" and dist.get_rank() == odd:
                time.sleep(2 * PATIENCE)
            if case == "sleeps":
                net(torch.ones(8, 4))
    except (RanksDisagree, PeerFailed, ArithmeticError) as error:
        return type(error).__name__, str(error), time.monotonic() - started
    finally:
        patch.undo()
    return "", "", time.monotonic() - started


CASES = {
    "batch": "ranks disagree in all_gather of TensorLinear.forward in Net.layers.0 (collective 1): "
    "rank ODD has shape='(6, 4)', the others '(8, 4)'",
    "dtype": "ranks disagree in all_gather of TensorLinear.forward in Net.layers.0 (collective 1): "
    "rank ODD has dtype='torch.float64', the others 'torch.float32'",
    "autocast": "ranks disagree in all_gather of TensorLinear.forward in Net.layers.0 (collective 1): "
    "rank ODD has autocast='torch.bfloat16', the others 'off'; "
    "rank ODD has dtype='torch.bfloat16', the others 'torch.float32'",
    "no_grad": "ranks disagree in all_gather of TensorLinear.forward in Net.layers.0 (collective 1): "
    "rank ODD has gradients of='none', the others 'weight, bias'",
    "frozen": "ranks disagree in all_gather of PhantomLinear.forward in Net.layers.2 (collective 3): "
    "rank ODD has gradients of='x', the others 'x, local, compress, decompress, bias'",
    "skipped": "ranks disagree at collective 3: rank ODD called all_gather of PhantomLinear.forward in Net.layers.3; "
    "the others called all_gather of PhantomLinear.forward in Net.layers.2",
    "skipped last": "ranks disagree at collective 4: rank ODD called all_gather of Gather.forward in Net; "
    "the others called all_gather of PhantomLinear.forward in Net.layers.3",
    "swapped": "ranks disagree at collective 2: rank ODD called all_gather of PhantomLinear.forward in Net.layers.2; "
    "the others called all_gather of PhantomLinear.forward in Net.layers.1",
    "no backward": "ranks disagree at collective 6: rank ODD left the checked block; "
    "the others called reduce_scatter of PhantomLinear.backward in Net.layers.3",
    "sleeps": "ranks disagree at collective 9: rank ODD made no collective within 2 s; "
    "the others called all_gather of TensorLinear.forward in Net.layers.0",
}


@pytest.mark.parametrize("case", CASES)
def test_every_rank_names_the_rank_the_layer_and_the_difference(ranks, case):
    odd = 0 if case in ("skipped", "no backward") else 1  # rank 0 compares for all
    for kind, message, seconds in ranks(RANKS)(outcome, case, odd):
        assert (kind, message) == ("RanksDisagree", CASES[case].replace("ODD", str(odd)))
        assert seconds < 30  # not by the timeout, which is 120 s in the other cases


def test_an_error_of_one_rank_ends_the_others_with_its_name(ranks):
    found = ranks(RANKS)(outcome, "raises", 1)
    assert found[1][:2] == ("ArithmeticError", "no numbers today")
    for kind, message, _ in (found[0], found[2]):
        assert kind == "PeerFailed"
        assert "rank 1 raised ArithmeticError: no numbers today" in message


def counted(checked: bool) -> tuple[list, dict, bool]:
    torch.manual_seed(0)
    net = Net(mesh_of_all())
    with check_ranks() if checked else nullcontext(), Ledger() as ledger:
        inside = collectives.before_collective is not None
        y = net(torch.ones(8, 4))
        y.sum().backward()
    assert collectives.before_collective is None
    grads = [p.grad.to_local().tolist() for p in net.parameters()]
    return [y.tolist(), grads], ledger.to_dict(), inside == checked


def test_neither_the_numbers_nor_the_counted_bytes_change(ranks):
    pool = ranks(RANKS)
    for plain, checked in zip(pool(counted, False), pool(counted, True), strict=True):
        assert plain == checked


def average(odd: int) -> str:
    mesh = mesh_of_all()
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].bias.requires_grad_(dist.get_rank() != odd)
    net(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RanksDisagree) as caught, check_ranks():
        average_gradients(net, mesh)
    return str(caught.value)


def test_a_parameter_that_one_copy_has_frozen_is_named(ranks):
    for message in ranks(2)(average, 1):
        assert message == (
            "ranks disagree at collective 4: rank 0 called all_reduce of the gradient of 1.bias; "
            "rank 1 left the checked block"
        )


def backward_alone(odd: int) -> str:
    net, x = Net(mesh_of_all()), torch.ones(8, 4)
    y = net(x)
    backward = y.sum().backward if dist.get_rank() != odd else list
    with pytest.raises(RanksDisagree) as caught, check_ranks():
        backward()
    return str(caught.value)


def test_a_block_may_have_the_backward_pass_alone_where_layers_have_no_names(ranks):
    for message in ranks(RANKS)(backward_alone, 1):
        assert message == (
            "ranks disagree at collective 1: rank 1 left the checked block; "
            "the others called reduce_scatter of PhantomLinear.backward"
        )


def frozen_pair(odd: int) -> str:
    """Megatron's pair in bf16, whose first layer exchanges in the backward pass alone."""
    mesh = mesh_of_all()
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    plan = {"1": column_style("bf16"), "2": row_style("bf16")}
    parallelize_module(net, mesh, plan)[1].requires_grad_(dist.get_rank() != odd)
    with pytest.raises(RanksDisagree) as caught, check_ranks():
        net(torch.ones(8, 4)).sum().backward()
    return str(caught.value)


def test_a_layer_that_exchanges_in_the_backward_pass_alone_is_named(ranks):
    for message in ranks(2)(frozen_pair, 1):
        assert message == (
            "ranks disagree in reduce_scatter of ColumnLinear.backward in Sequential.1 (collective 3): "
            "rank 0 has gradients of='x, weight, bias'; rank 1 has gradients of='x'"
        )


def other_order(odd: int) -> str:
    """Two layers of the same class and shape that belong to no module."""
    mesh = mesh_of_all()
    first, second = (PhantomLinear(12, 12, blocks=3, ghosts=2, mesh=mesh) for _ in range(2))
    net = nn.Sequential(second, first) if dist.get_rank() == odd else nn.Sequential(first, second)
    with pytest.raises(RanksDisagree) as caught, check_ranks():
        net[1](net[0](torch.ones(8, 4)))
    return str(caught.value)


def test_layers_of_one_shape_in_another_order_are_told_apart(ranks):
    for message in ranks(RANKS)(other_order, 1):
        assert "ranks disagree in all_gather of PhantomLinear.forward in PhantomLinear (collective 1)" in message
        assert "rank 1 has layer built as number='" in message


def other_tokens(odd: int, name: str, interleave: int) -> str:
    """A transformer on ranks, of which one differs in what all need alike, or in the second layer."""
    sizes = {"vocab": 12, "dim": 24, "layers": 2, "heads": 3, "hidden": 24, "context": 8}
    model = GPT(GPTConfig(**sizes, blocks=3, ghosts=2), mesh=mesh_of_all(), interleave=interleave)
    given = {"tokens": torch.ones(4, 5, dtype=torch.long), "targets": torch.ones(4, 5, dtype=torch.long)}
    if dist.get_rank() == odd:
        if name in given:
            given[name][2, 3] = 7
        else:
            model.layers[1].mlp.down.compress.requires_grad_(False)
    with pytest.raises(RanksDisagree) as caught, check_ranks():
        model.loss(**given).backward()
    return str(caught.value)


@pytest.mark.parametrize("name", ["tokens", "targets"])
def test_tokens_that_ranks_need_alike_are_compared(ranks, name):
    for message in ranks(RANKS)(other_tokens, 2, name, 1):
        assert f"ranks disagree in the {name} of the model, which all ranks need alike" in message
        assert "rank 2 has values=" in message


def test_layers_of_parts_that_take_turns_are_named(ranks):
    for message in ranks(RANKS)(other_tokens, 1, "frozen", 2):
        assert "Begin.forward in GPT.layers.1.mlp.down" in message
        assert "rank 1 has gradients of=" in message


def test_ranks_of_a_fake_process_group_are_not_compared():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        layer = PhantomLinear(8, 8, blocks=2, ghosts=2, mesh=mesh_of_all())
        with check_ranks():
            layer(torch.ones(3, 4)).sum().backward()
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("package", ["phantom_parallel", "phantom_parallel.ops"])
def test_the_environment_switches_it_on_whatever_is_imported(package):
    code = f"import {package}; from phantom_parallel.ops import collectives; print(collectives.before_collective)"
    environment = os.environ | {rank_check.VARIABLE: "ranks"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "RankCheck.compare" in found.stdout


@pytest.mark.slow
def test_compiled_code_is_not_checked(ranks):
    for difference, calls in ranks(2)(compiled):
        assert difference < 1e-5
        assert calls == 0


def compiled() -> tuple[float, int]:
    torch.manual_seed(0)
    layer = PhantomLinear(8, 8, blocks=2, ghosts=2, mesh=mesh_of_all())
    x, calls = torch.randn(4, 4), []
    expected, fast = layer(x), torch.compile(layer, fullgraph=True)
    with check_ranks(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "before_collective", lambda *args: calls.append(args))
        found = fast(x)
        found.sum().backward()
    return float((found - expected).abs().max()), len(calls)


@pytest.mark.slow
def test_the_environment_switches_it_on_in_launched_ranks(monkeypatch):
    monkeypatch.setenv(rank_check.VARIABLE, "ranks")
    with pytest.raises(RanksDisagree, match=r"in PhantomLinear .collective 2.: rank 0 has shape=.*; rank 1 has shape"):
        launch(2, workers.differ_in_second_batch)


def test_another_value_of_the_variable_is_warned_about(monkeypatch):
    monkeypatch.setenv(rank_check.VARIABLE, "rank")
    with pytest.warns(UserWarning, match="PHANTOM_DEBUG=rank has no meaning: the only value is ranks"):
        rank_check.enable_from_environment()
