"""Phantom layers fitted to outputs: against brute-force least squares and the dense layer itself."""

import pytest
import torch
from torch import nn

from phantom_parallel.nn import PhantomLinear
from phantom_parallel.nn.fit import damped, fit_outputs, ghost_spectrum, solve


def problem(n_in: int = 24, n_out: int = 18, rows: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    """Correlated inputs, a few directions of which have most of the variance, and a weight."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(n_in, n_in, generator=generator, dtype=torch.float64) * (2.0 ** -torch.arange(n_in) * 4 + 0.05)
    x = torch.randn(rows, n_in, generator=generator, dtype=torch.float64) @ mixing.T
    return x, torch.randn(n_out, n_in, generator=generator, dtype=torch.float64)


def layer_of(fit, blocks: int) -> PhantomLinear:
    return PhantomLinear.from_weights(fit.local, fit.compress, fit.decompress, None, blocks=blocks)


@pytest.mark.parametrize("blocks", [2, 3])
def test_the_error_falls_with_ghosts_and_is_that_of_the_layer(blocks):
    x, weight = problem()
    s = damped(x.T @ x / len(x), 0.0)
    errors = []
    for ghosts in (1, 2, 4, 8):
        fit = fit_outputs(s, weight, blocks=blocks, ghosts=ghosts)
        difference = layer_of(fit, blocks)(x) - x @ weight.T
        measured = float(difference.square().sum() / len(x))
        assert float(fit.errors.sum()) == pytest.approx(measured, rel=1e-6, abs=1e-9)
        errors.append(measured)
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 10 * errors[-1]


def test_full_rank_is_the_dense_layer_even_where_the_covariance_is_singular():
    x, weight = problem(rows=10)
    fit = fit_outputs(damped(x.T @ x / len(x)), weight, blocks=3, ghosts=8)
    torch.testing.assert_close(layer_of(fit, 3).to_dense().weight, nn.Parameter(weight), atol=1e-6, rtol=1e-6)


def test_for_its_ghosts_the_refit_is_least_squares():
    x, weight = problem()
    fit = fit_outputs(damped(x.T @ x / len(x), 0.0), weight, blocks=3, ghosts=2, steps=0)
    compress = fit.compress.view(3, 2, 8)
    y = x @ weight.T
    for i in range(3):
        ring = [(i + 1) % 3, (i + 2) % 3]
        z = torch.cat([x[:, 8 * i : 8 * i + 8], *(x[:, 8 * j : 8 * j + 8] @ compress[j].T for j in ring)], 1)
        expected = torch.linalg.lstsq(z, y[:, 6 * i : 6 * i + 6]).solution.T
        actual = torch.cat([fit.local[6 * i : 6 * i + 6], fit.decompress[6 * i : 6 * i + 6]], 1)
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


def test_alternating_steps_lower_the_error_and_beat_the_fit_of_weights():
    x, weight = problem()
    s = damped(x.T @ x / len(x), 0.0)
    once = fit_outputs(s, weight, blocks=3, ghosts=2, steps=0).errors.sum()
    often = fit_outputs(s, weight, blocks=3, ghosts=2, steps=20).errors.sum()
    assert often < once
    dense = nn.Linear(24, 18, bias=False, dtype=torch.float64)
    dense.weight.data.copy_(weight)
    plain = PhantomLinear.from_dense(dense, blocks=3, ghosts=2)
    assert often < 0.5 * float((plain(x) - dense(x)).square().sum() / len(x))
    informed = PhantomLinear.from_dense(dense, blocks=3, ghosts=2, covariance=x.T @ x / len(x))
    error = float(((informed(x) - dense(x)).square().sum() / dense(x).square().sum()).sqrt())
    assert informed.relative_error == pytest.approx(error, rel=1e-2)


def test_a_wrong_covariance_is_refused():
    for wrong in (torch.eye(23), torch.full((24, 24), torch.nan)):
        with pytest.raises(ValueError, match="covariance"):
            PhantomLinear.from_dense(nn.Linear(24, 18), blocks=3, ghosts=2, covariance=wrong)


def on_ranks(weight, covariance):
    from torch.distributed.device_mesh import init_device_mesh

    dense = nn.Linear(24, 18, dtype=torch.float64)
    dense.load_state_dict({"weight": weight, "bias": torch.arange(18.0)})
    layer = PhantomLinear.from_dense(
        dense, blocks=6, ghosts=2, covariance=covariance, mesh=init_device_mesh("cpu", (2,))
    )
    return layer.to_dense().state_dict()


def test_the_fit_is_the_same_on_ranks(ranks):
    x, weight = problem()
    dense = nn.Linear(24, 18, dtype=torch.float64)
    dense.load_state_dict({"weight": weight, "bias": torch.arange(18.0)})
    expected = PhantomLinear.from_dense(dense, blocks=6, ghosts=2, covariance=x.T @ x).to_dense().state_dict()
    for actual in ranks(2)(on_ranks, weight, x.T @ x):
        torch.testing.assert_close(actual, expected, atol=1e-8, rtol=1e-8)


def test_solving_with_a_singular_matrix_stays_finite():
    values = solve(torch.ones(3, 3, dtype=torch.float64), torch.ones(2, 3, dtype=torch.float64))
    assert values.isfinite().all()
    torch.testing.assert_close(values @ torch.ones(3, 3, dtype=torch.float64), torch.ones(2, 3, dtype=torch.float64))


def test_the_spectrum_falls_and_predicts_the_gain_of_independent_blocks():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(12, 12, generator=generator, dtype=torch.float64)
    s = torch.eye(12, dtype=torch.float64)
    spectrum = ghost_spectrum(s, weight, blocks=2)
    for gains, _ in spectrum:
        assert bool((gains.diff() <= 1e-12).all())
    left = sum(float(gains[2:].sum()) for gains, _ in spectrum)
    assert float(fit_outputs(s, weight, blocks=2, ghosts=2).errors.sum()) == pytest.approx(left)


@pytest.mark.parametrize("blocks", [2, 3])
def test_rows_of_c_and_columns_of_d_have_the_same_mean_square(blocks):
    x, weight = problem()
    fit = fit_outputs(damped(x.T @ x / len(x), 0.0), weight, blocks=blocks, ghosts=3)
    columns = torch.zeros(blocks, 3, dtype=torch.float64)
    pieces = fit.decompress.unflatten(0, (blocks, -1)).unflatten(2, (blocks - 1, 3))  # by receiver, in ring order
    for i in range(blocks):
        for step in range(1, blocks):
            columns[(i + step) % blocks] += pieces[i, :, step - 1].square().mean(0) / (blocks - 1)
    torch.testing.assert_close(columns.flatten(), fit.compress.square().mean(1))
