"""Calibration fits what it is given; validation compares like with like. No test looks at the clock."""

import pytest
import torch.distributed as dist

from phantom_parallel.cost.calibrate import (
    PRODUCTS,
    Measured,
    fit_non_negative,
    fit_profile,
    small_setting,
)
from phantom_parallel.cost.hardware import dump_profile, load_profile
from phantom_parallel.cost.local import on_ranks, threads_for
from phantom_parallel.cost.settings import Setting
from phantom_parallel.cost.timing import Clock, step_time
from phantom_parallel.cost.validate import Outcome, grid


def test_the_fit_finds_the_coefficients_that_made_the_data():
    rows = [(1.0, float(x), float(x * x)) for x in range(1, 9)]
    assert fit_non_negative(rows, [2 + 3 * x + 0.5 * y for _, x, y in rows]) == pytest.approx([2, 3, 0.5])


def test_the_fit_has_no_negative_coefficients():
    rows = [(1.0, float(x)) for x in range(1, 9)]
    found = fit_non_negative(rows, [10.0 - x for _, x in rows])
    assert found[1] == 0.0
    assert found[0] > 0


def synthetic(ranks: int = 2) -> Measured:
    """A machine of the model: 50 GFLOP/s, 10 GB/s, exchanges of 1 ms + 1 GB/s, 20 us a product, 300 us a layer."""

    def seconds(p) -> float:
        touched = 4 * p.batch * (p.rows * p.inner + p.inner * p.columns + p.rows * p.columns)
        return p.flops / 50e9 + touched / 10e9

    exchanges = [(words, 1e-3 + (ranks - 1) * words * 4 / 1e9) for words in (512, 4096, 32768)]
    measured = Measured(ranks, [(p, seconds(p)) for p in PRODUCTS], exchanges, 0.25, {})
    bare = fit_profile(Measured(ranks, measured.products, exchanges, 0.25, {"phantom": 1e-12, "tensor": 1e-12}))
    small = {}
    for strategy in ("phantom", "tensor"):
        shape = small_setting(ranks).shape(strategy)
        small[strategy] = step_time(shape, bare).total + 20e-6 * len(list(shape.products)) + 300e-6 * 2 * shape.depth
    return Measured(ranks, measured.products, exchanges, 0.25, small)


def test_a_machine_that_follows_the_model_is_found_again():
    profile = fit_profile(synthetic())
    assert profile.peak["fp32"].value == pytest.approx(50e9, rel=1e-3)
    assert profile.memory_bandwidth.value == pytest.approx(10e9, rel=1e-3)
    assert profile.collective_overhead_seconds.value == pytest.approx(1e-3, rel=1e-3)
    assert profile.inside.bandwidth.value == pytest.approx(1e9, rel=1e-3)
    assert profile.product_overhead_seconds.value == pytest.approx(20e-6, rel=0.02)
    assert profile.layer_overhead_seconds.value == pytest.approx(300e-6, rel=0.02)
    assert profile.overlap.value == 0.25
    assert not profile.has_power


def test_the_fitted_profile_times_products_as_they_were_measured():
    measured = synthetic(4)
    profile = fit_profile(measured, watts=(10.0, 6.0, 2.0))
    clock = Clock(profile)
    overhead = profile.product_overhead_seconds.value
    for product, seconds in measured.products:
        assert clock.product(product) - overhead == pytest.approx(seconds, rel=1e-2)
    assert (profile.compute_watts.value, profile.idle_watts.value) == (10.0, 2.0)


def test_a_calibrated_profile_is_a_profile_like_any_other(tmp_path):
    profile = fit_profile(synthetic())
    dump_profile(profile, tmp_path / f"{profile.name}.toml")
    assert load_profile(tmp_path / f"{profile.name}.toml") == profile


def test_the_error_is_that_of_the_ratio():
    outcome = Outcome(grid(2)[0], {"phantom": 1.0, "tensor": 2.0}, {"phantom": 3.0, "tensor": 5.0})
    assert outcome.error == pytest.approx(0.2)
    assert outcome.to_dict()["predicted_ratio"] == pytest.approx(0.6)


def test_the_grid_can_be_built_and_is_held_out():
    measured = {(p.rows, p.inner, p.columns) for p in PRODUCTS}
    for ranks in (1, 2, 4, 8):
        for setting in grid(max(ranks, 2)):
            for strategy in ("phantom", "tensor"):
                shape = setting.shape(strategy)
                assert not {(p.rows, p.inner, p.columns) for p in shape.products} & measured


def report_sum(mesh, report, number: int) -> None:
    report(f"from {mesh.size()} ranks")
    report(number * dist.get_world_size())


def fail_on_one(mesh, report) -> None:
    if mesh.get_local_rank() == 1:
        raise ArithmeticError("rank 1 cannot count")
    dist.barrier()


def test_local_ranks_report_as_they_go():
    assert list(on_ranks(2, report_sum, 21)) == ["from 2 ranks", 42]


def test_a_rank_that_fails_is_named_and_ends_the_others():
    with pytest.raises(Exception, match=r"(?s)Process 1.*rank 1 cannot count"):
        list(on_ranks(2, fail_on_one))


def test_threads_are_cores_over_ranks(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert [threads_for(ranks) for ranks in (1, 2, 8, 16)] == [8, 4, 1, 1]


def test_settings_are_checked_like_any_shape():
    with pytest.raises(ValueError, match="blocks=3 does not divide"):
        Setting(2, 64, 2, 8, blocks=3, ghosts=2).shape("phantom")
