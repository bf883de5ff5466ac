"""Presets and studies as they ship, and what is said of those that are wrong."""

import re

import pytest

from phantom_parallel.study.settings import names_of, read_compare, read_study


@pytest.mark.parametrize("name", names_of("presets"))
def test_presets_are_readable(name):
    found = read_compare(name)
    assert found.name == name
    assert {"phantom", "megatron"} <= set(found.strategies)
    assert ("tensor" in found.strategies) == (found.task == "ffn")


@pytest.mark.parametrize("name", names_of("studies"))
def test_studies_are_readable(name):
    assert read_study(name).name == name


def test_what_ships():
    assert names_of("presets") == ["digits", "gpt", "paper", "quick", "standard"]
    assert names_of("studies") == ["batch", "ghosts", "scaling", "smaller", "wider", "width"]
    assert read_compare("paper").world == 256
    assert read_study("scaling").world == 8


def test_the_same_settings_for_all_but_what_is_phantoms_own():
    found = read_compare("quick", {"lr_local": 0.5})
    phantom, tensor = (found.config(s, lr=0.1, seed=1, steps=10) for s in ("phantom", "tensor"))
    assert (phantom.blocks, phantom.ghosts, phantom.lr_local) == (4, 16, 0.5)
    assert (tensor.blocks, tensor.ghosts, tensor.lr_local) == (None, None, 1.0)
    assert {**phantom.to_dict(), "strategy": 0, "blocks": 0, "ghosts": 0, "lr_local": 0} == {
        **tensor.to_dict(),
        "strategy": 0,
        "blocks": 0,
        "ghosts": 0,
        "lr_local": 0,
    }


def test_changes_go_where_they_belong():
    found = read_compare("quick", {"width": 64, "seeds": 7, "learning_rates": (0.1, 0.3), "strategies": ("tensor",)})
    assert found.training["width"] == 64
    assert (found.seeds, found.search.learning_rates, found.strategies) == (7, (0.1, 0.3), ("tensor",))


def test_cells_are_spread_over_lists():
    cells = read_study("ghosts").cells
    assert cells[0] == {"strategy": "tensor"}
    assert [cell["ghosts"] for cell in cells[1:]] == [1, 2, 4, 8, 16, 32, 64]
    assert len(read_study("batch").cells) == 24


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("seeds = 0\n[training]\nwidth = 8\ndepth = 1\nblocks = 2\nghosts = 1", "seeds"),
        ("sedes = 1\n", "unknown settings sedes; known are"),
        ("[training]\nwitdh = 8", "unknown settings witdh"),
        ("[training]\nwidth = 8", "ghosts=16 is larger than a block"),
        ('strategies = ["phantom", "magic"]\n[training]\nwidth = 8\ndepth = 1\nblocks = 2\nghosts = 1', "'magic'"),
        ("strategies = []", "strategies must be one or more"),
        ("[training]\nwidth = 9\ndepth = 1\nblocks = 2\nghosts = 1", "9"),
        ("[search]\nlearning_rates = [0.2, 0.1]", "rising numbers above 0, got [0.2, 0.1]"),
        ("[search]\nlearning_rates = []", "learning_rates"),
        ("training = 3", "[training] must be a table"),
        ("= nonsense", "not readable as TOML"),
    ],
)
def test_a_wrong_preset_is_told_what_is_wrong(tmp_path, text, told):
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(told)):
        read_compare(str(path))


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        ValueError, match="there is no 'fast': choose from digits, gpt, paper, quick, standard, or give a TOML file"
    ):
        read_compare("fast")
    with pytest.raises(ValueError, match="choose from batch, ghosts, scaling, smaller, wider, width"):
        read_study("speed")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('measure = "loss"\nquestion = "?"', "cells is missing"),
        ('measure = "luck"\nquestion = "?"\n[[cells]]\nstrategy = "tensor"', "measure must be one of loss, speed"),
        ('measure = "loss"\nquestion = "?"\n[[cells]]\nghosts = 3', "strategy must be one of"),
        ('measure = "loss"\nquestion = "?"\n[[cells]]\nstrategy = "tensor"\ncolour = "red"', "unknown settings colour"),
        ('measure = "loss"\nquestion = "?"\ncells = 3', "cells must be tables"),
        (
            'measure = "loss"\nquestion = "?"\n[reference]\nstrategy = "megatron"\n[[cells]]\nstrategy = "tensor"',
            "no cell matches the reference {'strategy': 'megatron'}",
        ),
    ],
)
def test_a_wrong_study_is_told_what_is_wrong(tmp_path, text, told):
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(told)):
        read_study(str(path))


def test_a_preset_of_the_other_kind_is_refused():
    with pytest.raises(ValueError, match="quick compares models of the kind ffn, not gpt"):
        read_compare("quick", task="gpt")
    assert read_compare("gpt", {"dim": 128}, task="gpt").training["dim"] == 128
