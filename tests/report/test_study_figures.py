"""Figures of studies: sweeps, smaller models, links and batch sizes."""

from dataclasses import replace

import pytest

from phantom_parallel.report import smaller_figures as smaller
from phantom_parallel.report import study_figures as sweeps
from phantom_parallel.report.study_tables import group_cells
from tests.study.sample import make_cell, make_regime, make_study


def captions_of(drawn):
    return {drawing.name: drawing.caption for drawing in drawn}


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("ghosts", ["ghosts-loss", "ghosts-joules", "ghosts-step-seconds", "ghosts-bytes-per-step"]),
        (
            "scaling",
            [
                "ranks-step-seconds",
                "ranks-step-seconds-modelled",
                "ranks-joules-per-sample",
                "ranks-joules-per-sample-modelled",
            ],
        ),
        ("smaller", ["smaller-joules", "smaller-parameters"]),
        ("batch", ["batch-joules-per-sample", "batch-step-seconds"]),
        ("width", ["width-step-seconds", "width-joules-per-sample"]),
        ("mine", ["width-step-seconds", "width-joules-per-sample"]),
    ],
)
def test_each_study_has_its_figures(name, figures):
    drawn = sweeps.study_figures(make_study(name))
    assert [drawing.name for drawing in drawn] == figures
    assert all(drawing.caption.endswith(".") for drawing in drawn)


def test_ghosts_says_from_where_the_loss_is_tensors():
    caption = captions_of(sweeps.study_figures(make_study("ghosts")))["ghosts-loss"]
    assert "phantom is no worse at ghosts 16, 32, 64, and worse at the others" in caption  # 0.053 of tensor
    assert "0.0435 at 64, tensor 0.053" in caption


def test_scaling_has_figures_of_their_own_for_measured_and_for_modelled_cells():
    study = make_study("scaling")
    cells = [
        replace(one, settings=one.settings | {"width": 65536} if one.modelled else one.settings) for one in study.cells
    ]
    drawn = {drawing.name: drawing for drawing in sweeps.study_figures(replace(study, cells=tuple(cells)))}
    measured, modelled = drawn["ranks-step-seconds"], drawn["ranks-step-seconds-modelled"]
    assert "At ranks 8: phantom 7 ms, tensor 21 ms (0.33 of it)" in measured.caption
    assert measured.caption.startswith("Steps were measured here, for depth 2, width 1,024, batch 64, ghosts 16.")
    assert modelled.caption.startswith(
        "Not run: steps are modelled by frontier-mi250x, for depth 2, width 65,536, batch 64, ghosts 16. At ranks 256"
    )
    assert modelled.title == "Step time against ranks, modelled steps"
    energy = drawn["ranks-joules-per-sample"]
    assert energy.caption.startswith("Steps were measured here, and energy is modelled from their times, for ")
    assert "modelled energy per sample" in energy.figure.axes[0].get_ylabel()
    for drawing, ranks, face in ((measured, [1, 2, 4, 8], None), (modelled, [16, 32, 64, 128, 256], "#ffffff")):
        lines = drawing.figure.axes[0].lines
        assert len(lines) == 3  # blocks rise with ranks and split nothing
        assert all(list(line.get_xdata()) == ranks for line in lines)
        assert all((line.get_linestyle() == "--") == (face is not None) for line in lines)
        assert all((line.get_markerfacecolor() == "#ffffff") == (face is not None) for line in lines)


def test_batch_has_a_line_for_each_strategy_and_ranks():
    lines = sweeps.lines_of(group_cells(make_study("batch").cells), "batch")
    assert [line.label for line in lines] == [
        f"{strategy} (ranks {ranks})" for strategy in ("phantom", "tensor") for ranks in (1, 2, 4)
    ]
    caption = captions_of(sweeps.study_figures(make_study("batch")))["batch-step-seconds"]
    for ranks in (1, 2, 4):
        assert f"At batch 512: phantom (ranks {ranks}) " in caption
        assert f"Phantom (ranks {ranks}) is nowhere worse." in caption


def test_a_sweep_in_which_phantom_is_worse_says_where():
    cells = [
        make_cell(strategy, {"step_seconds": seconds}, width=width)
        for strategy, width, seconds in (
            ("phantom", 256, 0.003),
            ("tensor", 256, 0.002),
            ("phantom", 512, 0.004),
            ("tensor", 512, 0.008),
        )
    ]
    (drawing,) = sweeps.study_figures(make_study("width", cells=tuple(cells)))
    assert drawing.caption == (
        "At width 512: phantom 4 ms, tensor 8 ms (0.50 of it). Phantom is worse than tensor at width 256."
    )


def test_smaller_rings_phantom_models_on_fewer_ranks():
    best, small = smaller.reaching(group_cells(make_study("smaller").cells))
    assert (best.strategy, best.settings["ranks"]) == ("tensor", 4)
    assert [(one.settings["ranks"], one.settings["ghosts"]) for one in small] == [(2, 32), (1, 32)]
    caption = captions_of(sweeps.study_figures(make_study("smaller")))["smaller-joules"]
    assert (
        "Phantom models on fewer ranks that reach it: 1 rank with 32 ghosts, for 36 J, 0.38 of tensor's; 2 ranks with "
        "32 ghosts, for 33 J, 0.35 of tensor's."
    ) in caption
    worse = [cell for cell in make_study("smaller").cells if cell.values["loss"] >= 0.05]
    assert all(cell.values["reached"] == 0 for cell in worse if cell.settings["strategy"] == "phantom")
    said = captions_of(sweeps.study_figures(make_study("smaller", cells=tuple(worse))))["smaller-joules"]
    assert said.endswith("No phantom model on fewer ranks reached that loss.")


def test_smaller_believes_runs_that_say_whether_they_reached_the_target():
    cells = (
        make_cell("tensor", {"loss": 0.052, "target": 0.05, "reached": 1.0, "joules": 9.0}, ranks=4),
        make_cell("phantom", {"loss": 0.049, "target": 0.05, "reached": 1.0, "joules": 3.0}, ranks=2, seed=0),
        make_cell("phantom", {"loss": 0.051, "target": 0.05, "reached": 0.0, "joules": None}, ranks=2, seed=1),
        make_cell("phantom", {"loss": 0.0499, "target": 0.05, "reached": 1.0, "joules": 4.0}, ranks=1),
    )
    best, small = smaller.reaching(group_cells(cells))
    assert smaller.limit_of(best) == 0.05
    assert [one.settings["ranks"] for one in small] == [1]
    (drawing,) = sweeps.study_figures(make_study("smaller", cells=cells))
    assert drawing.caption.endswith("1 of 3 models missed the loss and are not drawn.")


def test_time_to_the_loss_is_drawn_against_links_and_batches():
    both = {drawing.name for drawing in sweeps.study_figures(make_regime())}
    assert {"link-seconds-batch-64", "batch-seconds-link-100mbit", "batch-step-seconds-link-100mbit"} <= both
    links = sweeps.study_figures(make_regime((("loopback", 64), ("100mbit", 64))))
    assert [drawing.name for drawing in links] == ["link-seconds", "link-joules", "link-step-seconds"]
    axes = links[0].figure.axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["loopback", "100mbit"]
    phantom = next(line for line in axes.lines if line.get_label() == "phantom")
    assert list(phantom.get_ydata()) == [2.0, 3.0]
    assert links[0].caption == (
        "Medians over seeds; in brackets, ratios with 95 % intervals, by seed. Link loopback: tensor is first (0.50 "
        "[0.50, 0.50] of phantom's, the next). Link 100mbit: phantom is first (0.50 [0.50, 0.50] of phantom-copies's, "
        "the next)."
    )


def test_losses_after_different_steps_are_not_compared():
    """Cells that go on beyond the loss of a reference: their final losses are after more steps than the reference's."""
    values = {"loss": 0.2, "target": 0.3, "reached": 1.0, "loss_at_equal_steps": 0.31, "loss_at_equal_energy": 0.28}
    cells = [
        make_cell("megatron", values | {"loss": 0.3, "loss_at_equal_steps": 0.3, "loss_at_equal_energy": 0.3}, dim=256),
        make_cell("phantom", values, dim=256),
        make_cell("phantom", values | {"loss_at_equal_steps": 0.29}, dim=384),
    ]
    study = make_study("wider", cells=tuple(cells), settings={"reference": {"strategy": "megatron"}, "measure": "loss"})
    said = captions_of(sweeps.study_figures(study))
    assert "dim-loss" not in said
    assert (
        said["dim-loss-at-equal-steps"]
        == "At dim 256: phantom 0.31, megatron 0.3 (1.03 times it). Phantom is worse than megatron at dim 256."
    )
    assert said["dim-loss-at-equal-energy"].endswith("Phantom is not worse there.")
