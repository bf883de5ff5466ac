"""The formulas against the tables of the method, computed here by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phantom_parallel.cost.terms import grid_layer, phantom_layer, tensor_layer
from phantom_parallel.families.gpt.cost import GPTShape
from phantom_parallel.utils.layout import BlockLayout, RowLayout
from tests.cost.shapes import ffn

sizes = st.integers(1, 9)


@given(p=st.integers(2, 9), m_in=sizes, m_out=sizes, k=st.integers(1, 1), rows=sizes)
def test_phantom_counts_are_the_methods_table(p, m_in, m_out, k, rows):
    """Per rank and row with one block a rank."""
    layer = phantom_layer(BlockLayout(p * m_in, p * m_out, p, k, p), rows, bias=False)
    forward = sum(product.multiply_adds for product in layer.products if product.phase == "forward")
    backward = sum(product.multiply_adds for product in layer.products if product.phase == "backward")
    assert forward == rows * (m_out * m_in + k * m_in + (p - 1) * k * m_out)
    assert backward == 2 * forward
    assert [e.moved_bytes(1) for e in layer.exchanges] == [rows * (p - 1) * k] * 2
    assert p * sum(layer.parameters) == p * m_out * m_in + p * k * m_in + p * (p - 1) * k * m_out


@given(ranks=st.integers(2, 9), m_in=sizes, m_out=sizes, rows=sizes)
def test_tensor_counts_are_the_methods_table(ranks, m_in, m_out, rows):
    for rank in (0, ranks - 1):
        layer = tensor_layer(RowLayout(ranks * m_in, ranks * m_out, ranks), rows, bias=False, rank=rank)
        forward = sum(product.multiply_adds for product in layer.products if product.phase == "forward")
        backward = sum(product.multiply_adds for product in layer.products if product.phase == "backward")
        assert forward == rows * ranks * m_in * m_out
        assert backward == 2 * forward
        assert [e.moved_bytes(1) for e in layer.exchanges] == [rows * (ranks - 1) * m_in] * 2


@pytest.mark.parametrize(
    ("optimizer", "make"),
    [
        ("sgd", lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
        ("momentum", lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)),
        ("adam", torch.optim.AdamW),
    ],
)
def test_the_state_of_an_optimizer_is_torchs(optimizer, make):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model(torch.ones(3, 8)).sum().backward()
    made = make(model.parameters())
    made.step()
    tensors = [value for state in made.state.values() for name, value in state.items() if name != "step"]
    kept = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    assert ffn("dense", 8, 2, batch=3, optimizer=optimizer).memory.optimizer == kept


def test_a_two_dimensional_layer_by_hand():
    """8 ranks as 2 x 4 and 6 rows: a rank has 6 * 16 / 8 = 12 input and 6 * 32 / 8 = 24 output words."""
    layout = RowLayout(16, 32, 8)
    for transposed, tile, sent in ((False, 8 * 8, [3 * 12, 24, 24, 3 * 12]), (True, 4 * 16, [12, 3 * 24, 3 * 24, 12])):
        layer = grid_layer(layout, 6, 2, bias=True, transposed=transposed)
        assert [e.moved_bytes(1) for e in layer.exchanges] == sent
        assert [e.ranks for e in layer.exchanges] == ([2, 4, 4, 2] if transposed else [4, 2, 2, 4])
        assert [e.stride for e in layer.exchanges] == ([4, 1, 1, 4] if transposed else [1, 4, 4, 1])
        assert layer.parameters == (tile, 32 // 8)
        assert {product.multiply_adds for product in layer.products} == {6 * tile}


SIZES = {"strategy": "megatron", "vocab": 256, "dim": 64, "layers": 3, "heads": 8, "hidden": 192, "context": 12}


def test_a_two_dimensional_transformer_has_the_dense_models_work_and_weights():
    shape, dense = GPTShape.of(**SIZES, ranks=16, grid=4, batch=8), GPTShape.of(**SIZES, batch=8)
    assert shape.multiply_adds() * 16 == dense.multiply_adds()
    assert shape.model_parameters == dense.model_parameters
    rows, layer = 8 * 12, shape.costs[1:6]  # qkv, attention, out, gate_up, down
    maps = ((64, 192, 4), (64, 64, 4), (64, 384, 4), (192, 64, 4))  # of 4 by 4 tiles
    sent = sum(rows * (n_in // side * 3 // 4 + n_out // side * 3 // 4) for n_in, n_out, side in maps)
    assert sum(e.moved_bytes(4) for part in layer for e in part.exchanges if e.phase == "forward") == 4 * sent


def test_caat_net_sums_a_share_of_megatrons_channels():
    whole, part = (GPTShape.of(**SIZES, ranks=4, batch=8, channels=share) for share in (1.0, 0.25))
    each = 2 * 3 * (8 * 12 * 64 * 4) // 4  # bytes that a rank sends in an all-reduce of the stream
    assert whole.moved_bytes() - part.moved_bytes() == 3 * 4 * each * 3 // 4  # of 3 layers, 2 forward and 2 backward
    assert part.multiply_adds() == whole.multiply_adds()
    assert part.memory == whole.memory
