"""Options of a study that would change no cell are refused, and others are not."""

import pytest

from phantom_parallel.study.settings import read_study
from phantom_parallel.study.unused import check_changes


def check(name, **changes):
    check_changes(read_study(name), read_study(name, changes), changes, name)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("scaling", {"ranks": 100000}, r"--ranks changes nothing in the study scaling: every cell sets ranks itself"),
        ("width", {"width": 64}, r"copy .*studies/width\.toml, edit its cells and give the path of the copy"),
        ("batch", {"batch": 8}, "every cell sets batch itself"),
        ("ghosts", {"ghosts": 8}, "every cell either sets ghosts itself or does not have it"),
        ("width", {"micro_batches": 4}, "either sets micro_batches itself or does not have it"),
        ("scaling", {"seeds": 3}, "--steps and --rounds"),
        ("scaling", {"learning_rates": (0.1,)}, "without a search"),
        ("scaling", {"search_steps": 7}, "--search-steps changes nothing"),
        ("ghosts", {"rounds": 3}, "use --seeds"),
        ("ghosts", {"at_most": 9}, "no cell is trained to the loss of a reference"),
        ("ghosts", {"hardware": "dgx-a100"}, "it has no modelled cells"),
        ("batches", {"batch": 64}, "it has batch sizes of its own \\(32, 128, 512, 1536\\): use --batches"),
        ("links", {"link": "1gbit"}, "it has links of its own .*: use --links"),
    ],
)
def test_what_changes_no_cell_is_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        check(name, **changes)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("scaling", {"width": 4096}),  # of the measured cells; the modelled ones have their own
        ("scaling", {"hardware": "dgx-a100", "rounds": 1}),
        ("ghosts", {"width": 512}),  # the value of the file
        ("ghosts", {"width": 1024, "search_steps": 10, "seeds": 1}),
        ("smaller", {"at_most": 9}),
        ("wider", {"stop_at_target": True}),
        ("batches", {"link": "1gbit", "batches": (32,)}),
        ("links", {"batch": 64, "links": ("1gbit",)}),
    ],
)
def test_what_changes_a_cell_is_not(name, changes):
    check(name, **changes)
