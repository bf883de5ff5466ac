"""Examples run, and learn what they say they do."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run_example(name, folder, *arguments):
    """Run on every rank, as torchrun does it. Returns what was printed."""
    before, printed = (os.getcwd(), sys.argv), io.StringIO()
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    os.chdir(folder)
    sys.argv = [name, *arguments]
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        os.chdir(before[0])
        sys.argv = before[1]
        del os.environ["WORLD_SIZE"]
    return printed.getvalue()


def losses(text):
    return [float(value) for value in re.findall(r"loss ([\d.]+)", text)]


@pytest.mark.parametrize(("name", "size"), [("train.py", 2), pytest.param("train_fsdp.py", 4, marks=pytest.mark.slow)])
def test_trainings_learn_on_ranks(ranks, tmp_path, name, size):
    first, *others = ranks(size)(run_example, name, tmp_path, "41")
    assert losses(first)[-1] < 0.8 * losses(first)[0]
    assert not any(others)


def test_the_training_is_that_of_another_number_of_ranks(ranks, tmp_path):
    alone, both = (ranks(size)(run_example, "train.py", tmp_path, "3")[0] for size in (1, 2))
    assert losses(alone) == pytest.approx(losses(both), abs=2e-4)


@pytest.mark.slow
def test_a_language_model_is_converted_and_healed(ranks, tmp_path):
    pytest.importorskip("transformers")
    (text,) = ranks(1)(run_example, "convert_hf.py", tmp_path)
    dense, converted, healed = (
        float(re.search(rf"{name} ([\d.]+)", text)[1]) for name in ("dense", "converted", "healed")
    )
    assert dense < healed < converted
    assert "[1, 2, 4] ranks" in text


def test_energy_is_measured(ranks, tmp_path):
    for text in ranks(2)(run_example, "measure_energy.py", tmp_path):
        assert re.findall(r"^(\w+): [\d.e-]+ s, .*\((?:counter|modelled)\b", text, re.MULTILINE) == ["dense", "phantom"]


@pytest.mark.slow
def test_ranks_come_and_go():
    run = subprocess.run([sys.executable, EXAMPLES / "two_ranks.py"], capture_output=True, text=True, check=True)
    assert losses(run.stdout)[-1] < losses(run.stdout)[0]
