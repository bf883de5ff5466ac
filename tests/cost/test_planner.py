"""The planner: what it considers, what it drops and why, what it calls best, and what it says when nothing fits."""

import pytest

from phantom_parallel.cost.hardware import Profile, Tier
from phantom_parallel.cost.planner import GIB, Layout, ModelSizes, PlanRequest, plan
from phantom_parallel.cost.timing import step_time
from phantom_parallel.families.gpt.cost import GPTShape
from tests.cost.shapes import ffn
from tests.cost.test_hardware import figure, toy


def request(profile: Profile | None = None, **changes: object) -> PlanRequest:
    sizes = {name: changes.pop(name, default) for name, default in (("width", 64), ("depth", 4))}
    common: dict[str, object] = {"batch": 16, "devices": 8}
    return PlanRequest(model=ModelSizes("ffn", sizes), profile=profile or toy(), **{**common, **changes})  # type: ignore[arg-type]


GPT = {"vocab": 64, "dim": 64, "layers": 4, "heads": 16, "hidden": 192, "context": 16}


def test_transformers_combine_stages_with_ranks_inside_and_copies() -> None:
    model, limit = ModelSizes("gpt", GPT), 0.65
    whole = GPTShape.of(**GPT, strategy="megatron", ranks=4, batch=8, dp=2).memory.total
    common: dict[str, object] = {"model": model, "profile": toy(), "batch": 16, "devices": 16, "ghosts": (2,)}
    answer = plan(PlanRequest(**common, memory_gib=limit * whole / GIB, dp=(2,)))  # type: ignore[arg-type]
    layout = Layout("megatron", 2, 2, micro_batches=4, pp=4)
    (actual,) = [c for c in answer.candidates if c.layout == layout]
    shape = GPTShape.of(**GPT, strategy="megatron", ranks=2, pp=4, dp=2, batch=8, micro_batches=4)
    assert actual.seconds == step_time(shape, toy()).total
    assert actual.memory_bytes == max(stage.memory.total for stage, _ in shape.stages())
    assert actual.devices == 16
    assert not [c for c in answer.candidates if c.layout.strategy == "megatron" and c.layout.pp == 1]
    assert {c.layout.strategy for c in answer.candidates if c.layout.pp > 1} >= {"megatron", "phantom", "caat-net"}
    caat = [c for c in answer.best_of_each if c.layout.strategy == "caat-net"]
    assert answer.break_even(caat[0])[0] == answer.best_dense.seconds / caat[0].seconds


def test_every_strategy_has_a_layout_or_a_reason() -> None:
    tight = PlanRequest(model=ModelSizes("gpt", GPT), profile=toy(), batch=16, devices=8, dp=(1,), pp=(1,))
    largest = max(c.memory_bytes for c in plan(tight).candidates if c.layout.strategy != "dense")
    answer = plan(PlanRequest(**vars(tight) | {"memory_gib": largest / GIB}))
    assert list(answer.missing) == ["dense"]
    assert "dense on 1 rank needs" in answer.missing["dense"]
    assert "GiB a device, more than" in answer.missing["dense"]
    odd = plan(PlanRequest(**vars(tight) | {"strategy": ("dense", "tensor-2d")}))
    assert odd.missing == {"tensor-2d": "tensor-2d: no layout on up to 8 devices"}


def test_the_network_decides() -> None:
    free = Tier(figure(0), figure(1e30))
    best = plan(
        request(toy(collective_overhead_seconds=0, inside=free, between=free), strategy=("dense", "tensor"))
    ).best_dense
    assert (best.layout.strategy, best.devices) == ("tensor", 8)
    assert plan(request(toy(collective_overhead_seconds=1e9))).best_dense.layout == Layout("dense", 1, 1)
    thin = toy(overlap=0, inside=Tier(figure(0), figure(1e-3)), between=Tier(figure(0), figure(1e-3)))
    shared = plan(request(thin, dp=(1,), ghosts=(1, 8), strategy=("tensor", "megatron", "phantom")))
    few, many = (shared.break_even(c)[0] for c in shared.best_of_each if c.layout.blocks)
    assert few > many


def test_each_goal_is_met() -> None:
    plans = {goal: plan(request(goal=goal)) for goal in ("time", "energy", "devices")}
    candidates = [c for c in plans["time"].candidates if c.same_model]
    assert plans["time"].best_dense.seconds == min(c.seconds for c in candidates)
    assert plans["energy"].best_dense.joules == min(c.joules for c in candidates)
    assert plans["devices"].best_dense.devices == 1
    alone = [c for c in candidates if c.devices == 1]
    assert plans["devices"].best_dense.seconds == min(c.seconds for c in alone)
    for goal, answer in plans.items():
        rows = answer.best_of_each
        assert [c.same_model for c in rows] == sorted((c.same_model for c in rows), reverse=True)
        phantoms = [c for c in answer.candidates if c.layout.strategy == "phantom"]
        measure = {"time": "seconds", "energy": "joules", "devices": "devices"}[goal]
        assert getattr(rows[-1], measure) == min(getattr(c, measure) for c in phantoms)


def test_the_break_even_is_where_the_best_dense_layout_takes_as_long_to_the_loss() -> None:
    answer = plan(request(ghosts=(2,)))
    dense = [c for c in answer.candidates if c.same_model]
    for c in answer.candidates:
        time, energy = answer.break_even(c)
        if c.same_model:
            assert (time, energy) == (None, None)
        else:
            assert time * c.seconds == pytest.approx(min(d.seconds for d in dense))
            assert energy * c.joules == pytest.approx(min(d.joules for d in dense))
    alone = plan(request(strategy=("phantom",), ghosts=(2,)))
    assert alone.best_dense is None
    assert alone.break_even(alone.candidates[0]) == (None, None)


def test_memory_too_small_names_the_layout_that_comes_nearest() -> None:
    limit = ffn("tensor", 1024, 4, ranks=32, batch=64).memory.total / GIB
    with pytest.raises(ValueError, match=r"nothing fits: tensor on 8 ranks needs"):
        plan(request(width=1024, batch=64, devices=8, memory_gib=limit, strategy=("tensor",), dp=(1,)))
    assert plan(request(width=1024, batch=64, devices=32, memory_gib=limit, strategy=("tensor",), dp=(1,)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 9, "strategy": ("tensor",)}, "2 ranks do not divide in_features=9"),
        ({"blocks": (8,), "ghosts": (9,)}, "ghosts=9"),
        ({"dp": (3,)}, "dp=3 does not divide batch=16"),
        ({"devices": 2048}, "use at most 1024"),
        ({"dtype": "fp8"}, "'fp8' has no peak"),
    ],
)
def test_an_impossible_request_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(request(**changes))
