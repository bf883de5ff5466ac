"""Settings, input and ranks that do not fit a transformer, each named."""

import pytest

from phantom_parallel import GPT, GPTConfig
from tests.families.gpt import reference as gpt_reference
from tests.families.gpt.sample import SIZES, config_of


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ladder": True, "strategy": "pipeline", "blocks": None, "ghosts": None}, "not pipeline: leave it out"),
        ({"parallel_block": True, "hidden": 60, "kv_heads": 8, "blocks": 4}, "kv_heads=8 must divide hidden=60"),
        ({"rope_base": 0.0}, "rope_base must be a number above 0, got 0.0"),
        ({"heads": 7}, "heads=7 does not divide dim=32: 4 or 8 would"),
        ({"heads": 32, "kv_heads": 4}, "must be even"),
        ({"kv_heads": 2}, "blocks=4 does not divide kv_heads=2"),
        ({"hidden_groups": 3}, "hidden_groups=3 does not divide hidden=40"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**(SIZES | {"blocks": 4, "ghosts": 2} | settings))


def test_input_that_does_not_fit_is_named():
    (tokens, _), m = gpt_reference.tokens(24), GPT(config_of())
    for run, message in (
        (lambda t: m.loss(t[0], t[0]), r"got shape \(9,\)"),
        (lambda t: m.loss(t, t[:, 1:]), r"\(2, 8\) for tokens of shape \(2, 9\)"),
        (lambda t: m.logits(t.repeat(1, 2)), "context of 16"),
        (lambda t: m.logits(t + 20), "from 0 to 23, got"),
        (lambda t: m.logits(t.to("meta")), "the input is on meta"),
        (lambda t: m.new_cache(1, 17), "17 positions"),
        (lambda t: m.logits(t, m.new_cache(3)), "batch size of 3, got 2"),
        (lambda t: m.logits(t, m.new_cache(2, 5)), "room for 5 positions"),
        (lambda t: GPT(config_of(), interleave=2, activation_checkpointing=True), "interleave=2 cannot be combined"),
    ):
        with pytest.raises(ValueError, match=message):
            run(tokens)
