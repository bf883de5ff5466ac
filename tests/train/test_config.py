"""What a training may be, and what is said of one that may not."""

import pytest

from phantom_parallel.families.ffn.config import FFNTrainConfig

PHANTOM = {"width": 16, "depth": 2, "blocks": 4, "ghosts": 2, "teacher_ghosts": 2}
DENSE = {"strategy": "dense", "blocks": None, "ghosts": None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (DENSE | {"strategy": "tensor", "blocks": 4}, "blocks and ghosts belong to the strategy phantom"),
        (DENSE | {"ranks": 2}, "dense runs on one rank"),
        (DENSE | {"lr_local": 2.0}, "belong to the strategy phantom"),
        (DENSE | {"strategy": "fsdp", "ranks": 3, "batch": 16}, "batch=16 is not a multiple of dp=1 times"),
        (DENSE | {"strategy": "pipeline", "ranks": 4}, "needs a layer for each, got 2: use fewer stages"),
        (DENSE | {"strategy": "pipeline", "ranks": 2, "micro_batches": 5, "batch": 16}, "batch=16 is not a multiple"),
        ({"batch": 10, "dp": 4}, "use 8 or 12"),
        ({"lr": float("nan")}, "lr must be a number above 0, got nan"),
        ({"schedule": "steps"}, "schedule must be one of constant, linear, cosine"),
        ({"momentum": 0.9}, "momentum belongs to the optimizer sgd"),
        ({"warmup": 1000}, "must be below steps=1000"),
        ({"teacher_blocks": 5}, "blocks=5 does not divide"),
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
