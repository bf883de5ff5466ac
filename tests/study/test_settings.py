"""Presets and studies as they ship, and what is said of those that are wrong."""

import json
import re
from dataclasses import replace

import pytest

from phantom_parallel.study.analysis import counts
from phantom_parallel.study.compare import least_sent
from phantom_parallel.study.contenders import DENSE, by_function
from phantom_parallel.study.settings import RegimeSettings, StudySettings, names_of, read_compare, read_study, to_dict
from phantom_parallel.utils.parsing import convert

HOSTS = ("digits-hosts", "mnist-hosts", "gpt-hosts")


@pytest.mark.parametrize("name", names_of("presets"))
def test_presets_are_readable(name):
    found = read_compare(name)
    assert found.name == name
    assert {"phantom", "megatron"} <= set(found.strategies)
    assert ("tensor" in found.strategies) == (found.family == "ffn")


@pytest.mark.parametrize("name", names_of("studies"))
def test_studies_are_readable(name):
    assert read_study(name).name == name


def test_what_ships():
    assert names_of("presets") == [
        "digits",
        "digits-hosts",
        "gpt",
        "gpt-hosts",
        "mnist-hosts",
        "paper",
        "planted",
        "quick",
        "standard",
    ]
    assert names_of("studies") == ["batch", "batches", "ghosts", "links", "scaling", "smaller", "wider", "width"]
    assert read_compare("paper").world_size == 256
    assert read_study("scaling").world_size == 8


@pytest.mark.parametrize(
    "found", [*map(read_compare, HOSTS), read_study("links"), read_study("batches")], ids=lambda one: one.name
)
def test_on_hosts_fsdp_and_pipelines_share_the_dense_models_curve_in_every_variant(found):
    group = by_function(found.contenders)[DENSE]
    assert {"megatron", "dense", "fsdp", "pipeline"} <= {one.strategy for one in group}
    for batch in getattr(found, "batches", ()) or (found.training["batch"],):
        here = replace(found, training=found.training | {"batch": batch})
        for one in group:
            for variant in here.variants(one):
                counted = counts(here.config(variant, lr=1e-3, seed=0, steps=here.steps))
                assert min(counted.values()) > 0
        (pipeline,) = (one for one in group if one.strategy == "pipeline")
        (fsdp,) = (one for one in group if one.strategy == "fsdp")
        assert len(least_sent(here, here.variants(pipeline))) == len(here.variants(pipeline)) > 1
        assert least_sent(here, here.variants(fsdp)) == [replace(fsdp, frees_weights=False)]


def test_all_strategies_that_cut_layers_try_the_same_parts_in_turns():
    found = read_compare("gpt-hosts")
    tried = {one.name: [variant.interleave for variant in found.variants(one)] for one in found.contenders}
    cutting = ("phantom", "megatron", "phantom+int8", "megatron+int8")
    assert {name: tried[name] for name in cutting} == {name: [1, 2] for name in cutting}
    assert tried["copies"] == tried["phantom-copies"] == [None]
    (_, turns) = found.variants(found.contenders[0])
    assert found.config(turns, lr=1e-3, seed=0, steps=found.steps).interleave == 2
    assert turns.variant == "2 parts in turns"


def test_the_same_settings_for_all_but_what_is_phantoms_own():
    found = read_compare("quick", {"lr_local": 0.5})
    phantom, tensor = (found.config(one, lr=0.1, seed=1, steps=10) for one in found.contenders[:2])
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
    ("text", "message"),
    [
        ("seeds = 0\n[training]\nwidth = 8\ndepth = 1\nblocks = 2\nghosts = 1", "seeds"),
        ("sedes = 1\n", "unknown settings sedes; known are"),
        ("[training]\nwitdh = 8", "unknown settings witdh"),
        ("[training]\nwidth = 8", "ghosts=16 is larger than a block"),
        ('strategies = ["phantom", "magic"]\n[training]\nwidth = 8\ndepth = 1\nblocks = 2\nghosts = 1', "'magic'"),
        ("strategies = []", "strategies must be one or more"),
        ("[training]\nwidth = 9\ndepth = 1\nblocks = 2\nghosts = 1", "blocks=2 does not divide in_features=9"),
        ("[search]\nlearning_rates = [0.2, 0.1]", "ascending numbers above 0, got [0.2, 0.1]"),
        ("[search]\nlearning_rates = []", "learning_rates"),
        ("training = 3", "[training] must be a table"),
        ("= nonsense", "not readable as TOML"),
        ("[search]\nlearning_rates = 0", "own.toml: search.learning_rates: Expected array, got int"),
        ("[search]\nlearning_rates = [nan]", "ascending numbers above 0, got [nan]"),
        ("[search]\nlearning_rates = [0.1, inf]", "ascending numbers above 0, got [0.1, inf]"),
        ('seeds = "3"', "own.toml: seeds: Expected int, got str"),
        ("seeds = 3.0", "own.toml: seeds: Expected int, got float"),
        ("steps = true", "own.toml: steps: Expected int, got bool"),
        ("target_loss = nan", "target_loss must be a number above 0, got nan"),
        ("target_loss = [1]", "own.toml: target_loss: Expected float | null, got array"),
        ("family = 3", "the model family must be one of ffn, gpt"),
        ('family = "cnn"', "the model family must be one of ffn, gpt"),
        ("strategies = 3", "own.toml: strategies: Expected array, got int"),
        ("inference_batches = [[1]]", "own.toml: inference_batches[0]: Expected int, got array"),
        ("[training]\nwidth = 'wide'", "the training of phantom: width: Expected int, got str"),
        ("[training]\neval_every = [5]", "the training of phantom: eval_every: Expected int, got array"),
        ("[training]\nschedule = 'steep'", "schedule: must be one of constant, linear, cosine, got 'steep'"),
        ("[training]\nbias = 1", "the training of phantom: bias: Expected bool, got int"),
        (f"[training]\nweight_decay = 1{'0' * 400}", "the training of phantom: weight_decay: Number out of range"),
        (f"[training]\nwidth = 1{'0' * 400}", "width must be at most 16777216, got a number of more than 20 digits"),
        ("[training]\ndepth = 1000000000", "depth must be at most 10000, got 1000000000"),
        ("[training]\nbatch = 1000000000", "batch must be at most 16777216"),
        ("[training]\nranks = 1000000000", "ranks must be at most 1048576"),
        (f"steps = 1{'0' * 5000}", "not readable as TOML"),
        (f"steps = {'[' * 5000}{']' * 5000}", "not readable as TOML: the data are nested too deeply"),
    ],
)
def test_a_wrong_preset_is_refused_with_the_reason(tmp_path, text, message):
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_compare(str(path))


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        ValueError, match="there is no 'fast': there are digits, digits-hosts, gpt, gpt-hosts, mnist-hosts"
    ):
        read_compare("fast")
    with pytest.raises(ValueError, match="there are batch, batches, ghosts, links, scaling, smaller, wider, width"):
        read_study("speed")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('measure = "loss"\nquestion = "?"', "cells is missing"),
        (
            'measure = "luck"\nquestion = "?"\n[[cells]]\nstrategy = "tensor"',
            "measure: must be one of loss, speed, got 'luck'",
        ),
        ('measure = "loss"\nquestion = "?"\n[[cells]]\nghosts = 3', "strategy must be one of"),
        ('measure = "loss"\nquestion = "?"\n[[cells]]\nstrategy = "tensor"\ncolour = "red"', "unknown settings colour"),
        ('measure = "loss"\nquestion = "?"\ncells = 3', "cells must be tables"),
        ('measure = "loss"\nquestion = "?"\ncells = [3]', "cells must be tables"),
        (
            'measure = "loss"\nquestion = "?"\nreference = 3\n[[cells]]\nstrategy = "tensor"',
            "reference: Expected object",
        ),
        ('measure = "loss"\nquestion = 3\n[[cells]]\nstrategy = "tensor"', "own.toml: question: Expected str, got int"),
        (
            'measure = "loss"\nquestion = "?"\n[[cells]]\nstrategy = "tensor"\nwidth = "x"',
            "width: Expected int, got str",
        ),
        (
            'measure = "loss"\nquestion = "?"\n[[cells]]\nstrategy = 3',
            "strategy must be one of",
        ),
        (
            'measure = "loss"\nquestion = "?"\n[[cells]]\nstrategy = "tensor"\n'
            f"width = {[64] * 200}\nbatch = {[64] * 200}",
            "[[cells]] have more than 10,000 combinations",
        ),
        (
            'measure = "loss"\nquestion = "?"\n[reference]\nstrategy = "megatron"\n[[cells]]\nstrategy = "tensor"',
            "no cell matches the reference {'strategy': 'megatron'}",
        ),
    ],
)
def test_a_wrong_study_is_refused_with_the_reason(tmp_path, text, message):
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_study(str(path))


REGIME = """
measure = "regime"
question = "?"
strategies = ["phantom", "copies"]
hosts = 2
links = ["loopback", "100mbit"]
batches = [16, 32]
[training]
width = 16
ghosts = 2
ranks = 2
samples = 256
"""


def test_a_regime_has_comparisons_at_each_link_and_batch(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(REGIME)
    found = read_study(str(path), {"seeds": 2})
    assert isinstance(found, RegimeSettings)
    slow, fast = found.at(batch=32, link="100mbit"), found.at(link="loopback")
    assert (slow.hosts, slow.link, slow.training["batch"], slow.seeds) == (2, "100mbit", 32, 2)
    assert (fast.hosts, fast.link) == (None, None)
    assert (found.all_links, found.all_batches) == (("loopback", "100mbit"), (16, 32))
    assert convert(json.loads(json.dumps(to_dict(found))), RegimeSettings, "json") == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("\nhosts = 2", ""), "the link 100mbit is one of emulated hosts: give their number with --hosts"),
        (('"100mbit"', '"fast"'), "link must be a rate such as 100mbit"),
        (('"100mbit"', '"loopback"'), "links and batches must be different from each other"),
        (("[16, 32]", "[16, 15]"), "batch=15 is not a multiple of dp=2"),
        (("\nhosts = 2", "\nhosts = 3"), "2 ranks cannot be spread evenly over 3 hosts"),
        (("\nhosts = 2", "\nhosts = 2\ntimeout = 0.5"), "timeout must be from 1 to 1,000,000 seconds, got 0.5"),
        (('"100mbit"', '"like:abacus"'), "abacus"),
    ],
)
def test_a_wrong_regime_is_refused_with_the_reason(tmp_path, change, message):
    path = tmp_path / "own.toml"
    path.write_text(REGIME.replace(*change))
    with pytest.raises(ValueError, match=re.escape(message)):
        read_study(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('link = "100mbit"', "--link 100mbit is for links of emulated hosts: give their number with --hosts"),
        ("hosts = 3\n[training]\nranks = 4", "4 ranks cannot be spread evenly over 3 hosts"),
        ('hosts = 4\nlink = "like:abacus"\n[training]\nranks = 4', "abacus"),
        ("timed_seconds = 0", "timed_seconds must be a number above 0, got 0"),
    ],
)
def test_a_wrong_network_is_refused_before_anything_is_measured(tmp_path, text, message):
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_compare(str(path))


def test_a_preset_of_the_other_kind_is_refused():
    with pytest.raises(ValueError, match="quick is about models of the family ffn, not gpt"):
        read_compare("quick", family="gpt")
    assert read_compare("gpt", {"dim": 128}, family="gpt").training["dim"] == 128


def test_the_key_task_of_version_1_is_the_family(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text('task = "gpt"\nstrategies = ["phantom", "megatron"]')
    assert read_compare(str(path)).family == "gpt"


def test_changes_of_the_search_have_a_prefix():
    found = read_study("ghosts", {"search_steps": 7, "learning_rates": (0.1,), "steps": 9, "width": 256})
    assert (found.search.steps, found.search.learning_rates, found.steps) == (7, (0.1,), 9)
    assert found.training["width"] == 256
    assert read_compare("quick", {"search_extend": 0}).search.extend == 0


def test_settings_survive_json():
    settings = read_study("wider")
    assert convert(json.loads(json.dumps(to_dict(settings))), StudySettings, "json") == settings
