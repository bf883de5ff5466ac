"""What a training may be, and what is said of one that may not."""

import pytest

from phantom_parallel.families.ffn.config import FFNTrainConfig

PHANTOM = {"width": 16, "depth": 2, "blocks": 4, "ghosts": 2, "teacher_ghosts": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": 3}, "blocks=3 does not divide"),
        ({"ranks": 3}, "3 ranks do not divide blocks=4"),
        ({"strategy": "tensor"}, "blocks and ghosts belong to the strategy phantom"),
        ({"strategy": "dense", "blocks": None, "ghosts": None, "ranks": 2}, "dense runs on one rank"),
        ({"strategy": "dense", "blocks": None, "ghosts": None, "lr_local": 2.0}, "belong to the strategy phantom"),
        ({"batch": 10, "dp": 4}, "use 8 or 12"),
        ({"steps": 0}, "steps must be a positive whole number, got 0"),
        ({"lr": float("nan")}, "lr must be a number above 0, got nan"),
        ({"weight_decay": -0.1}, "weight_decay must be a number of 0 or more"),
        ({"schedule": "steps"}, "schedule must be one of constant, linear, cosine"),
        ({"optimizer": "lion"}, "optimizer must be one of sgd, adamw"),
        ({"momentum": 0.9}, "momentum belongs to the optimizer sgd"),
        ({"optimizer": "sgd", "momentum": 1.0}, "momentum must be a number from 0 to below 1"),
        ({"warmup": 1000}, "must be below steps=1000"),
        ({"teacher_blocks": 5}, "the planted teacher .*blocks=5 does not divide"),
    ],
)
def test_what_does_not_fit_is_an_error_that_says_what_would(change, message):
    with pytest.raises(ValueError, match=message):
        FFNTrainConfig.of(**PHANTOM | change)


def test_the_learning_rate_rises_over_the_warm_up_and_falls_to_zero():
    for schedule, middle in (("constant", 1.0), ("linear", 0.5), ("cosine", 0.5)):
        config = FFNTrainConfig.of(**PHANTOM, steps=104, warmup=4, schedule=schedule)
        assert [config.lr_factor(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
        assert config.lr_factor(54) == pytest.approx(middle)
        assert config.lr_factor(104) == pytest.approx(1.0 if schedule == "constant" else 0.0)
