"""Commands on a simulated accelerator, against the same ones on one CPU rank."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from phantom_parallel import load_model
from phantom_parallel.cli.main import main
from phantom_parallel.cost.hardware import load_profile
from tests.device import accelerator
from tests.distributed.test_clusters import SMALLEST

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]
DATA = Path(__file__).resolve().parent.parent.parent / "README.md"
SHORT = ("--steps", "6", "--log-every", "3", "--eval-every", "3")
FFN = ("train", "--width", "32", "--depth", "2", "--batch", "16")
GPT = ("train", "gpt", "--dim", "32", "--layers", "2", "--heads", "4", "--context", "16", "--batch", "8")
GPT = (*GPT, "--eval-windows", "4", "--data", str(DATA))
GHOSTS = ("--blocks", "2", "--ghosts", "4")
SCRIPT = """
import json, sys
from phantom_parallel.cli.main import main
from tests.device.accelerator import waits

if __name__ == "__main__":
    for arguments in json.loads(sys.argv[1]):
        before = waits()
        print(f"=== {arguments[-1]}", file=sys.stderr, flush=True)
        code = main(arguments) or 0
        print("waits", json.dumps({kind: count - before[kind] for kind, count in waits().items()}))
        if code:
            sys.exit(code)
"""


def on_devices(count, *commands):
    """Run commands one after the other in a process that has so many devices."""
    lines = json.dumps([[str(word) for word in command] for command in commands])
    run, seconds = [sys.executable, "-c", SCRIPT, lines], 600 + 300 * len(commands)  # far above what is needed
    return subprocess.run(run, env=accelerator.environment(count), capture_output=True, text=True, timeout=seconds)


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def check(finished):
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout


# A training, and the one on the CPU that it equals.
STRATEGIES = {
    "phantom": ((*FFN, *GHOSTS), ()),
    "phantom, int8": ((*FFN, *GHOSTS), ("--wire", "int8")),
    "phantom, copies": ((*FFN, *GHOSTS), ("--ranks", "1", "--dp", "2")),
    "tensor": (FFN, ("--strategy", "tensor")),
    "megatron": (FFN, ("--strategy", "megatron")),
    "lowrank": ((*FFN, *GHOSTS, "--strategy", "lowrank"), ()),
    "fsdp": (FFN, ("--strategy", "fsdp")),
    "pipeline": (FFN, ("--strategy", "pipeline")),
    "gpt phantom": ((*GPT, *GHOSTS), ()),
    "gpt phantom, parallel block": ((*GPT, *GHOSTS, "--parallel-block"), ("--interleave", "2")),
    "gpt megatron": (GPT, ("--strategy", "megatron")),
    "gpt lowrank": ((*GPT, *GHOSTS, "--strategy", "lowrank"), ()),
    "gpt fsdp": (GPT, ("--strategy", "fsdp")),
    "gpt pipeline": (GPT, ("--strategy", "pipeline")),
}


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """The folder of all trainings on two devices, run by one process, and what those of a name printed on stderr."""
    folder, commands = tmp_path_factory.mktemp("trainings"), []
    for name, (model, layout) in STRATEGIES.items():
        ranks = () if "--ranks" in layout else ("--ranks", "2")
        for options in [("--dtype", "fp32"), ("--dtype", "bf16", "--tf32")][: 2 if name.endswith("phantom") else 1]:
            commands.append((*model, *SHORT, *layout, *ranks, *options, "--out", folder / name / options[1]))
    run = on_devices(2, *commands)
    assert check(run).count("waits") == len(commands)
    printed = run.stderr.split("=== ")
    return folder, {name: [text for text in printed if text.startswith(f"{folder / name}/")] for name in STRATEGIES}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_training_on_two_devices_is_that_of_one_cpu_rank(trainings, name, tmp_path):
    folder, printed, model = trainings[0] / name, trainings[1][name], STRATEGIES[name][0]
    assert "Simulated Accelerator, simulated_ccl" in printed[0]
    dense = () if "--ghosts" in model else ("--strategy", "dense")
    main([str(word) for word in (*model, *SHORT, *dense, "--out", tmp_path / "cpu")])
    expected = summary(tmp_path / "cpu")["eval_loss"]
    assert summary(folder / "fp32")["eval_loss"] == pytest.approx(expected, rel=1e-3 if "int8" in name else 1e-6)
    assert summary(folder / "fp32")["run"]["fp32_products"] == "highest"
    if name.endswith("phantom"):
        assert "Simulated Accelerator, tf32, simulated_ccl" in printed[1]
        assert summary(folder / "bf16")["run"]["fp32_products"] == "high"
        assert summary(folder / "bf16")["eval_loss"] == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("model", [(*FFN, *GHOSTS), (*GPT, *GHOSTS)], ids=["ffn", "gpt"])
def test_the_host_waits_for_the_device_at_boundaries_alone(model, tmp_path):
    runs = [(*model, "--steps", 2 * steps, "--log-every", steps, "--eval-every", steps) for steps in (2, 4, 8)]
    printed = check(on_devices(1, *((*run, "--out", tmp_path / str(index)) for index, run in enumerate(runs))))
    waits = [json.loads(line.removeprefix("waits ")) for line in printed.splitlines() if line.startswith("waits ")]
    assert len(waits) == len(runs)
    assert waits[0]["reads"] > 0  # the losses of both boundaries
    assert waits[1:] == waits[:-1]


def test_trained_resumed_run_converted_and_healed(tmp_path):
    gpt, text = tmp_path / "gpt", tmp_path / "text"
    text.write_text(DATA.read_text()[:6000])
    dense = (*GPT, "--strategy", "dense", *SHORT, "--out", tmp_path / "dense")
    train = (*GPT, *GHOSTS, "--log-every", "3", "--eval-every", "3", "--checkpoint-every", "3", "--out", gpt)
    prompt = ("--prompt", "ghosts", "--tokens", "8", "--json")
    converted = ("--model", tmp_path / "dense" / "model", "--out", tmp_path / "converted", "--calibration", text)
    heal = ("--model", tmp_path / "converted", "--teacher", tmp_path / "dense" / "model", "--data", text)
    check(
        on_devices(
            2,
            (*train, "--ranks", "2", "--steps", "3"),
            ("train", "--out", gpt, "--resume", "--ranks", "1", "--steps", "6"),
            ("generate", "--model", gpt / "model", "--ranks", "2", *prompt),
            ("eval", "--model", gpt / "model", "--ranks", "2", "--data", text),
            dense,
            ("model", "convert", *converted, "--length", "16", "--rows", "512", "--blocks", "2", "--budget", "0.8"),
            ("model", "heal", *heal, "--ranks", "2", "--context", "16", *SHORT, "--out", tmp_path / "healed"),
        )
    )
    main([str(word) for word in (*train[:-1], tmp_path / "cpu", "--steps", "6")])
    assert summary(gpt)["eval_loss"] == pytest.approx(summary(tmp_path / "cpu")["eval_loss"], rel=1e-6)
    assert math.isfinite(summary(tmp_path / "healed")["eval_loss"])


def test_predictions_and_models_that_are_saved_and_loaded(tmp_path):
    rows = np.random.default_rng(0).standard_normal((5, 32), dtype=np.float32)
    np.save(tmp_path / "x.npy", rows)
    model = tmp_path / "run" / "model"
    infer = ("infer", "--model", model, "--inputs", tmp_path / "x.npy", "--batch", "2", "--turns", "1")
    commands = [(*infer, "--ranks", ranks, "--out", tmp_path / f"{ranks}.npy") for ranks in "12"]
    check(on_devices(2, (*FFN, *GHOSTS, *SHORT, "--ranks", "2", "--out", tmp_path / "run"), *commands))
    with torch.no_grad():
        expected = load_model(model)(torch.from_numpy(rows)).numpy()
    for ranks in "12":
        np.testing.assert_allclose(np.load(tmp_path / f"{ranks}.npy"), expected, rtol=1e-5, atol=1e-6)
    moved = "from phantom_parallel import load_model, save_model; import sys; "
    moved += "save_model(load_model(sys.argv[1], device='simulated'), sys.argv[2])"
    run = [sys.executable, "-c", moved, str(model), str(tmp_path / "again")]
    subprocess.run(run, env=accelerator.environment(1), check=True, timeout=900)
    again, first = (load_model(folder).state_dict() for folder in (tmp_path / "again", model))
    assert all(torch.equal(again[name], first[name]) for name in first)


def test_the_doctor_compares_the_device_with_the_cpu(tmp_path):
    run = on_devices(2, ("doctor", "--json", tmp_path / "file.json"))
    assert "0 of 10 checks failed, 0 skipped" in check(run)
    assert json.loads((tmp_path / "file.json").read_text())["facts"]["backend"] == "simulated_ccl"


def test_the_device_is_measured_for_the_planner(tmp_path):
    variables = accelerator.environment(2) | {"PHANTOM_PROFILES": str(tmp_path)}
    for words in (("measure", "--seconds", "0.001"), ("check", "--turns", "1")):
        run = [sys.executable, "-c", SMALLEST, "machine", *words, "--ranks", "2"]
        check(subprocess.run(run, env=variables, capture_output=True, text=True, timeout=900, check=False))
    profile = load_profile(tmp_path / "this-machine-2.toml")
    assert profile.device == "Simulated Accelerator"
    assert profile.memory_bytes.value == 1 << 30
    assert set(profile.peak) == {"fp32", "bf16"}
