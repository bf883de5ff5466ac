"""Rows that are read from files, predictions against dense float64 maths, and files that appear whole or not at all."""

import os
import signal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel import load_model
from phantom_parallel.distributed.signals import Interrupted
from phantom_parallel.families.ffn.model import as_tensor
from phantom_parallel.infer.predict import largest_difference, open_inputs, predict, read_rows
from tests.infer.models import WIDTH, known, rows


def predict_on_rank(model, inputs, out, batch):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    seen = []
    bad = predict(load_model(model, mesh=mesh), open_inputs(inputs, WIDTH), batch, out=out, report=seen.append)
    return seen, bad


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("strategy", ["phantom", "tensor", "megatron"])
def test_predictions_are_those_of_the_dense_maths_on_any_ranks(tmp_path, ranks, size, strategy):
    truth, x, out = known(strategy), rows(11), tmp_path / "out.npy"
    x[5, 1] = x[9, 20] = np.nan
    np.save(tmp_path / "x.npy", x)
    results = ranks(size)(predict_on_rank, truth.save(tmp_path / "model"), tmp_path / "x.npy", out, 4)
    actual = np.load(out)
    assert actual.dtype == np.float64
    np.testing.assert_allclose(actual, truth.expected(torch.from_numpy(x)).numpy(), rtol=1e-11, atol=1e-11)
    assert results == [([4, 8, 11], {"non_finite_outputs": 2 * WIDTH, "non_finite_rows": 2})] * size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out.npy", "x.npy"]


def test_a_request_to_stop_leaves_nothing(tmp_path):
    np.save(tmp_path / "x.npy", rows(9))
    inputs = open_inputs(tmp_path / "x.npy", WIDTH)
    with pytest.raises(Interrupted, match="row 4 of 9"):
        predict(
            known().model,
            inputs,
            2,
            out=tmp_path / "out.npy",
            report=lambda done: os.kill(os.getpid(), signal.SIGTERM) if done == 4 else None,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]


def models_on_rank(model, inputs):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, inputs = load_model(model, mesh=mesh), open_inputs(inputs, WIDTH)
    baseline = as_tensor(model)
    weights = [layer.weight.detach().to_local() for layer in baseline.layers]
    return weights, largest_difference(model, baseline, lambda m: read_rows(m, inputs, slice(0, 6)))


@pytest.mark.parametrize("strategy", ["phantom", "megatron"])
def test_the_tensor_parallel_model_holds_rows_of_the_dense_weight(tmp_path, ranks, strategy):
    truth, x = known(strategy), rows(6)
    np.save(tmp_path / "x.npy", x)
    results = ranks(2)(models_on_rank, truth.save(tmp_path / "model"), tmp_path / "x.npy")
    for index, weight in enumerate(truth.weights):
        actual = torch.cat([weights[index] for weights, _ in results])
        torch.testing.assert_close(actual, weight, rtol=1e-12, atol=1e-12)
    largest = float(truth.expected(torch.from_numpy(x)).abs().max())
    for _, (difference, prediction) in results:
        assert difference <= 1e-11 * largest
        assert prediction == pytest.approx(largest)
