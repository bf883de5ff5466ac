"""Settings, input and ranks that do not fit a transformer, each named."""

import pytest

from phantom_parallel import GPT, GPTConfig
from tests.families.gpt import reference as gpt_reference
from tests.families.gpt.sample import SIZES, config_of, one_mesh


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ladder": True, "strategy": "pipeline", "blocks": None, "ghosts": None}, "not pipeline: leave it out"),
        ({"parallel_block": True, "hidden": 60, "kv_heads": 8, "blocks": 4}, "kv_heads=8 must divide hidden=60"),
        ({"tie_embeddings": "yes"}, "tie_embeddings must be true or false, got 'yes'"),
        ({"rope_base": 0.0}, "rope_base must be a number above 0, got 0.0"),
        ({"heads": 7}, "heads=7 does not divide dim=32: 4 or 8 would"),
        ({"kv_heads": 3}, "kv_heads=3 does not divide heads=8: 2 or 4 would"),
        ({"heads": 32, "kv_heads": 4}, "a head of 1 features .* even number"),
        ({"kv_heads": 2}, "blocks=4 does not divide kv_heads=2: kv_heads=4 would fit"),
        ({"hidden_groups": 3}, "hidden_groups=3 does not divide hidden=40: 2 or 4 would"),
        ({"layers": 10**9}, "layers must be at most 10000, got 1000000000"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**(SIZES | {"blocks": 4, "ghosts": 2} | settings))


def test_what_is_left_out_is_filled_in():
    config = GPTConfig(vocab=256, dim=512, layers=4, heads=8, blocks=4, ghosts=16)
    assert (config.kv_heads, config.hidden, config.head_dim, config.queries_per_kv) == (8, 1408, 64, 1)
    assert config.hidden_groups == 8
    assert GPTConfig(vocab=6, dim=12, layers=1, heads=6, blocks=3, ghosts=1).hidden % 3 == 0


def test_input_that_does_not_fit_is_named():
    (tokens, _), m = gpt_reference.tokens(24), GPT(config_of())
    for run, message in (
        (lambda t: m.loss(t[0], t[0]), r"tokens must be \(batch, positions\), got shape \(9,\)"),
        (lambda t: m.loss(t, t[:, 1:]), r"targets of shape \(2, 8\) for tokens of shape \(2, 9\)"),
        (lambda t: m.logits(t.repeat(1, 2)), "18 positions are more than the model's context of 16"),
        (lambda t: m.logits(t + 20), "tokens must lie from 0 to 23, got"),
        (lambda t: m.loss(t, t - 100), "targets must lie from 0 to 23, got -"),
        (lambda t: m.logits(t.to("meta")), "the input is on meta and the model on cpu"),
        (lambda t: m.new_cache(0), "batch must be a positive whole number, got 0"),
        (lambda t: m.new_cache(1, 17), "17 positions is longer than the model's context of 16"),
        (lambda t: m.logits(t, m.new_cache(3)), "made for a batch of 3, got one of 2"),
        (lambda t: m.logits(t, m.new_cache(2, 5)), "room for 5 positions and holds 0, got 9 more"),
        (lambda t: GPT(config_of(), interleave=2, activation_checkpointing=True), "interleave=2 cannot be combined"),
    ):
        with pytest.raises(ValueError, match=message):
            run(tokens)


def refused(*configs: GPTConfig) -> list[str]:
    messages = []
    for config in configs:
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            GPT(config, mesh=one_mesh())
        messages.append(str(caught.value))
    return messages


def test_ranks_that_do_not_fit_are_named(ranks):
    cases = {
        "4 ranks are 2 for each of 2 blocks, which do not divide a block's 3 ghosts: run on 2 or 6": {"blocks": 2},
        "4 ranks do not divide kv_heads=2": {"blocks": 2, "ghosts": 2, "kv_heads": 2},
        "4 ranks do not divide hidden_groups=2": {"blocks": 2, "ghosts": 2, "hidden_groups": 2},
        "4 ranks do not divide vocab=22": {"strategy": "megatron", "vocab": 22},
        "dense runs on one rank, got ranks=4": {"strategy": "dense"},
    }
    for messages in ranks(4)(refused, *(config_of(**settings) for settings in cases.values())):
        for message, expected in zip(messages, cases, strict=True):
            assert expected in message
