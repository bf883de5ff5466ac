"""Presets and studies as they ship, and what is said of those that are wrong."""

import json
import re
from pathlib import Path

import pytest

from phantom_parallel.study.settings import Settings, names_of, read_settings, varied_by
from phantom_parallel.utils.parsing import convert


def test_what_ships():
    hosts = {"darcy-hosts", "darcy-wide-hosts", "digits-hosts", "gpt-hosts", "mnist-hosts"}
    assert set(names_of("presets")) == hosts | {"digits", "gpt", "paper", "planted", "quick", "standard"}
    studies = "batch decode epochs ghosts links requests scaling serve smaller weak wider width"
    assert names_of("studies") == studies.split()
    assert read_settings("presets", "paper").world_size == 256
    assert read_settings("presets", str(Path(__file__).parents[2] / "examples" / "darcy-wide.toml")).world_size == 16
    assert read_settings("studies", "scaling").world_size == 8


@pytest.mark.parametrize(
    ("folder", "name"), [*(("presets", n) for n in names_of("presets")), *(("studies", n) for n in names_of("studies"))]
)
def test_settings_survive_json(folder, name):
    settings = read_settings(folder, name)
    assert convert(json.loads(json.dumps(settings.to_dict())), Settings, "json") == settings


def test_cells_are_combinations_of_lists_which_changes_replace():
    assert varied_by("studies", "ghosts") == {"ghosts": (1, 2, 4, 8, 16, 32, 64)}
    settings = read_settings("studies", "ghosts", {"ghosts": (2, 4), "width": 256})
    assert [each.label for each in settings.contenders] == ["tensor", "phantom ghosts=2", "phantom ghosts=4"]
    assert settings.training["width"] == 256
    batch = read_settings("studies", "batch", {"batch": (32, 64), "strategies": ("phantom", "copies")})
    assert [each.label for each in batch.contenders] == [
        f"{name} batch={batch}" for batch in (32, 64) for name in ("phantom", "copies")
    ]
    smaller = read_settings("studies", "smaller", {"ranks": (1,)})
    assert [each.ranks for each in smaller.contenders] == [4, 1, 1]  # the reference keeps its ranks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seeds = 0\n[training]\nwidth = 8\ndepth = 1\nblocks = 2\nghosts = 1", "seeds"),
        ("[training]\nwitdh = 8", "witdh"),
        ('strategies = ["phantom", "magic"]\n[training]\nwidth = 8\ndepth = 1\nblocks = 2\nghosts = 1', "'magic'"),
        ("[training]\nwidth = 9\ndepth = 1\nblocks = 2\nghosts = 1", "blocks=2"),
        ("= nonsense", "TOML"),
        ('family = "cnn"', "ffn, gpt"),
        ("[training]\nwidth = 'wide'", "'wide'"),
        ('[[cells]]\nstrategy = "phantom"\ncolour = "red"', "colour"),
        ('[reference]\nstrategy = "dense"\n[[cells]]\nstrategy = "tensor"', "reference"),
        ('hosts = 2\nlinks = ["1gbit", "2gbit"]\nshare_curves = false\n[training]\nranks = 2', "shared curves"),
    ],
)
def test_wrong_settings_are_refused_with_the_reason(tmp_path, text, message):
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_settings("presets", str(path))


def test_unknown_names_list_the_known_ones_and_families_must_agree():
    with pytest.raises(ValueError, match=r"'fast'.*digits, digits-hosts"):
        read_settings("presets", "fast")
    with pytest.raises(ValueError, match="ffn, not gpt"):
        read_settings("presets", "quick", family="gpt")
    assert read_settings("presets", "gpt", {"dim": 128}, family="gpt").training["dim"] == 128


def test_batch_and_data_grow_with_the_ranks_and_epochs_are_equal():
    weak = read_settings("studies", "weak")
    configs = {(each.ranks, each.dp): weak.config(each) for each in weak.contenders}
    assert {key: (config.batch, config.samples) for key, config in configs.items()} == {
        (ranks, dp): (64 * ranks * dp, 256 * ranks * dp) for ranks, dp in ((1, 1), (2, 1), (4, 1), (1, 2), (1, 4))
    }
    epochs = read_settings("studies", "epochs", {"batch": (32, 100), "rows": 1000})
    assert {config.batch: config.steps for config in epochs.configs()} == {32: 32, 100: 10}
