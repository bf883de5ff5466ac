"""Fields of elliptic equations, against analytic solutions and against each other."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.interpolate import RegularGridInterpolator

from phantom_parallel import FFN
from phantom_parallel.distributed.process_group import ParallelContext
from phantom_parallel.families.ffn import fields
from phantom_parallel.families.ffn.config import FFNTrainConfig
from phantom_parallel.families.ffn.family import FAMILY
from phantom_parallel.families.ffn.fields import Mesh, gaussian_fields, load_fields, poisson_solver
from phantom_parallel.families.ffn.fields import solve_darcy as solve
from phantom_parallel.train import train


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_fields.cache_clear()
    return tmp_path / "phantom-parallel" / "fields"


def test_poisson_converges_to_the_analytic_solution_with_the_square_of_the_spacing():
    errors = []
    for side in (15, 31):
        steps = np.arange(1, side + 1) / (side + 1)
        x, y = np.meshgrid(steps, steps, indexing="ij")
        u = np.sin(np.pi * x) * np.sin(2 * np.pi * y)
        source, solution = poisson_solver(side)(5 * np.pi**2 * u)
        np.testing.assert_allclose(source, 5 * np.pi**2 * u.ravel())
        errors.append(np.abs(solution - u.ravel()).max())
    assert errors[0] < 0.02
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.05)


def test_flow_across_layers_has_the_coefficients_of_layers_in_series():
    """With a coefficient that depends on one coordinate, the flux a u' on the centre line is continuous at the jump."""
    side = 63
    field = np.where(np.arange(side)[:, None] < side // 2, -1.0, 1.0) * np.ones((side, side))
    a, u = (values.reshape(side, side) for values in solve(field))
    assert set(np.exp(a).round(9).ravel()) == {3.0, 12.0}
    middle, jump = u[:, side // 2], side // 2
    left, right = 3 * (middle[jump - 1] - middle[jump - 2]), 12 * (middle[jump + 1] - middle[jump])
    assert left == pytest.approx(right, rel=0.2)
    assert middle.argmax() < jump  # pressure is higher where the coefficient is lower


def test_a_mesh_solves_the_same_equation_as_a_fine_grid():
    field = next(gaussian_fields(64, 1, seed=3))
    mesh, side = Mesh(24), 127
    log_a, u = mesh.solve(-np.ones((64, 64)))
    np.testing.assert_allclose(log_a, np.log(3))
    fine = np.zeros((side + 2, side + 2))
    fine[1:-1, 1:-1] = solve(-np.ones((side, side)))[1].reshape(side, side)
    steps = np.arange(side + 2) / (side + 1)
    np.testing.assert_allclose(u, RegularGridInterpolator((steps, steps), fine)(mesh.points), atol=0.01 * u.max())
    assert set(np.exp(mesh.solve(field)[0]).round(9)) == {3.0, 12.0}


@pytest.mark.parametrize("name", fields.FIELDS)
def test_fields_are_scaled_cached_and_the_same_for_any_number_of_rows(name, cache):
    many = load_fields(name, 8, 48, seed=1)
    assert many.x.shape == many.y.shape == (48, 64)
    assert many.x.mean() == pytest.approx(0, abs=1e-6)
    assert many.x.std() == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(many.y.mean(0), 0, atol=1e-5)
    assert many.y.std() == pytest.approx(1, abs=1e-5)
    few = load_fields(name, 8, 16, seed=1)
    np.testing.assert_allclose(few.mean + few.scale * few.y, (many.mean + many.scale * many.y)[:16], rtol=1e-5)
    files = sorted(cache.glob("*.npz"))
    assert len(files) == 2
    written = files[0].stat().st_mtime_ns
    load_fields.cache_clear()
    np.testing.assert_array_equal(load_fields(name, 8, 16, seed=1).y, few.y)
    assert files[0].stat().st_mtime_ns == written
    assert not np.array_equal(load_fields(name, 8, 16, seed=2).y, few.y)


def test_an_order_permutes_features_and_their_points_alike():
    tiles, rows, shuffled = (load_fields("darcy", 8, 16, order=order) for order in ("tiles", "rows", "random"))
    steps = np.arange(1, 9) / 9
    np.testing.assert_allclose(rows.points, np.stack(np.meshgrid(steps, steps, indexing="ij"), -1).reshape(-1, 2))
    for other in (tiles, shuffled):
        back = np.lexsort((other.points[:, 1], other.points[:, 0]))
        np.testing.assert_array_equal(other.x[:, back], rows.x)
        np.testing.assert_array_equal(other.y[:, back], rows.y)
    for block in tiles.points.reshape(4, 16, 2):  # a quarter of the square each
        np.testing.assert_allclose(np.ptp(block, axis=0), 3 / 9)


def drawn_after_training(cache: str, config: FFNTrainConfig) -> tuple[dict[str, list], FFN]:
    os.environ["XDG_CACHE_HOME"] = cache
    parallel, arrays = ParallelContext.create(config.ranks, config.dp, torch.device("cpu")), {}
    model, _ = train(config, parallel, finish=lambda task: arrays.update(FAMILY.held_out_fields(task)))
    return {name: values.tolist() for name, values in arrays.items()}, model if config.ranks == 1 else None


def whole_fields(cache: str, config: FFNTrainConfig) -> dict[str, list]:
    return drawn_after_training(cache, config)[0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", ["phantom", "tensor", "megatron", "fsdp", "pipeline"])
def test_held_out_fields_are_those_of_one_process_on_every_rank(ranks, tmp_path, strategy):
    blocks = {"blocks": 4, "ghosts": 2} if strategy == "phantom" else {}
    sizes = {"data": "poisson", "grid": 4, "samples": 64, "width": 16, "depth": 2, "batch": 16, "steps": 3, "lr": 0.02}
    config = FFNTrainConfig.of(strategy=strategy, **sizes, **blocks)
    alone, model = drawn_after_training(str(tmp_path), config)
    data = load_fields("poisson", 4, 64)
    held_out = slice(56, 58)  # an eighth of the rows is held out
    with torch.no_grad():
        out = model(torch.from_numpy(data.x[held_out])).numpy()
    expected = {"points": data.points, "source": data.x[held_out]}
    expected |= {"solution": data.mean + data.scale * data.y[held_out], "prediction": data.mean + data.scale * out}
    assert list(alone) == list(expected)
    for where in (alone, *ranks(2)(whole_fields, str(tmp_path), config.updated(ranks=2))):
        for name, values in expected.items():
            np.testing.assert_allclose(where[name], values, rtol=1e-4, atol=1e-5 * np.abs(values).max())


def test_rows_that_are_no_fields_are_not_drawn(tmp_path):
    sizes = {"data": "random", "strategy": "dense", "width": 16, "samples": 64, "batch": 16, "steps": 1}
    assert whole_fields(str(tmp_path), FFNTrainConfig.of(**sizes)) == {}


@pytest.mark.slow
def test_the_example_trains_and_draws(tmp_path):
    script = Path(__file__).parents[3] / "examples" / "darcy.py"
    picture = tmp_path / "darcy.png"
    sizes = ["--grid", "16", "--samples", "64", "--steps", "2", "--out", str(picture)]
    subprocess.run([sys.executable, script, *sizes], check=True, capture_output=True)
    assert picture.stat().st_size > 10_000
