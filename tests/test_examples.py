"""Examples run, and learn what they say they do."""

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phantom_parallel import replace_linear
from tests.conversion.test_api import pretrained
from tests.families.gpt.pretrained_models import greedy

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


@pytest.mark.slow
def test_a_converted_model_is_served_on_ranks(tmp_path):
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    model = pretrained("llama", **sizes, eos_token_id=None)
    replace_linear(model, blocks=4, ghosts=2, include=("model.*",))
    model.save_pretrained(tmp_path)
    prompt = torch.tensor([list(b"import")])
    expected = greedy(model, prompt, 8)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with subprocess.Popen(
        [*command, EXAMPLES / "serve_hf.py", tmp_path, "0"], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            address = next(line.split()[-1] for line in server.stdout if "listening" in line)
            for length in (8, 4):
                body = json.dumps({"prompt": "import", "max_new_tokens": length}).encode()
                with urllib.request.urlopen(address, body) as response:
                    text = json.load(response)["text"]
                assert text == bytes(expected[:length]).decode(errors="replace")
                with pytest.raises(urllib.error.HTTPError, match="400"):
                    urllib.request.urlopen(address, b'{"prompt": ""}')
        finally:
            server.terminate()


def test_energy_is_measured(ranks, tmp_path):
    for text in ranks(2)(run_example, "measure_energy.py", tmp_path):
        assert re.findall(r"^(\w+): [\d.e-]+ s, .*\((?:counter|modelled)\b", text, re.MULTILINE) == ["dense", "phantom"]


@pytest.mark.slow
def test_ranks_come_and_go():
    run = subprocess.run([sys.executable, EXAMPLES / "two_ranks.py"], capture_output=True, text=True, check=True)
    assert losses(run.stdout)[-1] < losses(run.stdout)[0]


def test_the_notebook_learns_and_has_its_outputs(monkeypatch, capsys):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    cells = [
        cell for cell in json.loads((EXAMPLES / "darcy.ipynb").read_text())["cells"] if cell["cell_type"] == "code"
    ]
    code, sizes = "\n".join("".join(cell["source"]) for cell in cells), "GRID, SAMPLES, STEPS = "
    small, changed = re.subn(f"{sizes}[^#]*", f"{sizes}16, 256, 40", code)
    assert changed == 1
    values = {}
    exec(compile(small, "darcy.ipynb", "exec"), values)
    assert values["error"] < 0.7 * values["history"][0]
    assert len(values["figure"].axes) == 8  # four fields with their colours
    printed = [line.split()[1:4] for line in capsys.readouterr().out.splitlines()]
    outputs = [output for cell in cells for output in cell["outputs"]]
    texts = "".join("".join(output.get("text", "")) for output in outputs)
    assert [line.split()[1:4] for line in texts.splitlines()] == printed  # the words, not the numbers
    assert any("image/png" in output.get("data", {}) for output in outputs)
