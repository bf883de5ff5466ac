"""Names of contenders, and the trainings that they stand for."""

import re

import pytest

from phantom_parallel.families.registry import get_family
from phantom_parallel.study.contenders import get_contender, models_of
from phantom_parallel.study.grid import same_rate
from phantom_parallel.study.settings import read_settings

FFN = get_family("ffn").strategies


@pytest.mark.parametrize(
    ("name", "strategy", "layout", "wire"),
    [
        ("phantom", "phantom", (4, 1), "full"),
        ("copies", "dense", (1, 4), "full"),
        ("dense", "dense", (1, 4), "full"),
        ("phantom-copies", "phantom", (1, 4), "full"),
        ("tensor+int8", "tensor", (4, 1), "int8"),
        ("phantom@2x2+bf16", "phantom", (2, 2), "bf16"),
        ("megatron@1x4", "megatron", (1, 4), "full"),
        ("dense@1x1", "dense", (1, 1), "full"),
        ("small-dense@1x2", "dense", (1, 2), "full"),
    ],
)
def test_a_name_is_a_strategy_a_layout_and_a_wire(name, strategy, layout, wire):
    made = get_contender(name, FFN, {"ranks": 4})
    assert (made.name, made.base.strategy, (made.ranks, made.dp), made.wire) == (name, strategy, layout, wire)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("phantom+pp=2", (2, 2, 1)),
        ("megatron@2x1+pp=2", (2, 2, 1)),
        ("copies+pp=2", (1, 2, 2)),
        ("dense@1x1+pp=4", (1, 4, 1)),
        ("phantom+pp=4+parallel", (1, 4, 1)),
    ],
)
def test_stages_divide_the_ranks(name, layout):
    made = get_contender(name, get_family("gpt").strategies, {"ranks": 4})
    assert (made.ranks, made.pp, made.dp) == layout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tensor+pp=3", "3 stages do not divide the ranks"),
        ("tensor@2x2+pp=2", "8 ranks, and there are 4"),
        ("tensor+pp=0", "pp"),
        ("magic", "phantom, tensor, megatron, dense"),
        ("tensor+int4", "'int4'"),
        ("copies+int8", "'copies+int8'"),
        ("tensor@3x2", "6 ranks, and there are 4"),
        ("copies@2x2", "dense runs on one rank"),
    ],
)
def test_a_name_that_is_not_understood_is_refused_with_the_reason(name, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        get_contender(name, FFN, {"ranks": 2, "dp": 2})


def test_contenders_with_the_same_losses_are_together():
    names = ("phantom", "tensor", "copies", "phantom-copies", "tensor+int8", "megatron", "phantom+int8")
    groups = models_of([get_contender(name, FFN, {"ranks": 4}) for name in names], share=True)
    assert {model: [each.name for each in group] for model, group in groups.items()} == {
        "phantom": ["phantom", "phantom-copies"],
        "dense model": ["tensor", "copies", "megatron"],
        "tensor+int8": ["tensor+int8"],
        "phantom+int8": ["phantom+int8"],
    }
    apart = [get_contender(name, FFN, {"ranks": 4}, (("batch", batch),)) for batch in (8, 16) for name in names[1:3]]
    assert list(models_of(apart, share=True)) == ["dense model batch=8", "dense model batch=16"]
    assert len(models_of(apart, share=False)) == 4


def test_options_are_settings_of_the_training_and_other_functions_have_other_losses():
    names = ["phantom", "phantom+parallel", "megatron+parallel", "copies+parallel", "pipeline", "dense@1x1"]
    names += ["pipeline+bf16", "pipeline+micro_batches=4", "phantom+ladder+interleave=2", "phantom+parallel+int8"]
    settings = read_settings("presets", "gpt-hosts", {"strategies": tuple(names)})
    configs = {each.name: settings.config(each) for each in settings.contenders}
    assert configs["phantom+parallel+int8"].model.parallel_block
    assert (configs["phantom+parallel+int8"].wire, configs["pipeline+bf16"].wire) == ("int8", "bf16")
    assert configs["pipeline+micro_batches=4"].micro_batches == 4
    assert configs["phantom+ladder+interleave=2"].interleave == 2
    assert not configs["phantom"].model.parallel_block
    groups = models_of(settings.contenders, share=True)
    assert {model: [each.name for each in group] for model, group in groups.items()} == {
        "phantom": ["phantom"],
        "phantom+parallel": ["phantom+parallel"],
        "dense model+parallel": ["megatron+parallel", "copies+parallel"],
        "dense model": ["pipeline", "dense@1x1", "pipeline+micro_batches=4"],
        "pipeline+bf16": ["pipeline+bf16"],
        "phantom+ladder+interleave=2": ["phantom+ladder+interleave=2"],
        "phantom+parallel+int8": ["phantom+parallel+int8"],
    }
    taken = same_rate(read_settings("presets", "gpt-hosts", {"strategies": tuple(names), "search_wires": False}))
    assert taken == {"phantom+parallel+int8": "phantom+parallel", "pipeline+bf16": "dense model"}
    with pytest.raises(ValueError, match="ladder is for strategies that cut layers over ranks, not pipeline"):
        read_settings("presets", "gpt-hosts", {"strategies": ("pipeline+ladder",)})
    with pytest.raises(ValueError, match="micro_batches belongs to the strategy pipeline"):
        read_settings("presets", "gpt-hosts", {"strategies": ("megatron+micro_batches=4",)})


def test_every_layout_trains_the_same_model_on_the_same_batch():
    settings = read_settings(
        "presets", "quick", {"ranks": 8, "blocks": None, "strategies": ("phantom", "phantom-copies")}
    )
    ranks, copies = (settings.config(each) for each in settings.contenders)
    assert (ranks.ranks, ranks.dp, copies.ranks, copies.dp) == (8, 1, 1, 8)
    assert ranks.model == copies.model  # 8 blocks, though copies have one rank each
    assert ranks.blocks == 8
    assert ranks.batch == copies.batch
