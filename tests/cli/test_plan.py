"""``phantom plan`` as a user meets it."""

import json

import pytest

from phantom_parallel.cli.main import main
from phantom_parallel.cli.plan import options_for
from phantom_parallel.families.registry import get_family
from tests.cli.commands import refused

Options, _ = options_for("ffn", [])
MODEL = {"width": 4096, "depth": 4, "batch": 64, "devices": 8}

GPT_WORDS = "gpt --dim 512 --layers 2 --heads 8 --context 256 --vocab 1024 --batch 16 --devices 8"


def run(capsys, **options):
    Options(**{**MODEL, **options}).run()
    return capsys.readouterr().out


def test_a_row_for_each_strategy_fits_a_terminal_and_phantom_has_its_break_even(capsys):
    shown = run(capsys)
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    assert "…" not in shown
    data = json.loads(run(capsys, json=True))
    rows = data["best_of_each_strategy"]
    assert [row["strategy"] for row in rows][-1] == "phantom"
    assert {row["strategy"] for row in rows} == set(get_family("ffn").strategies)
    for row in rows:
        assert sum(line.startswith(row["strategy"]) for line in lines) == 1
    phantom = rows[-1]
    assert rows[-2]["model_parameters"] == pytest.approx(phantom["model_parameters"], rel=0.01)  # of lowrank
    assert f"{phantom['break_even_time']:.2f}, {phantom['break_even_energy']:.2f}" in shown
    assert phantom["ghosts"] == 16
    assert [row["ghosts"] for row in json.loads(run(capsys, ghosts=(4, 8), json=True))["best_of_each_strategy"]][
        -2:
    ] == [4, 8]


def test_the_steps_of_a_tuned_model_are_held_against_the_break_even(tmp_path, capsys):
    path = tmp_path / "tune.json"
    path.write_text(json.dumps({"best": {"blocks": 4, "ghosts": 8, "steps_ratio": {"mean": 1.5}}}))
    rows = json.loads(run(capsys, tuned=path, json=True))["best_of_each_strategy"]
    (row,) = (row for row in rows if row["strategy"] == "phantom")
    assert (row["blocks"], row["ghosts"]) == (4, 8)
    shown = " ".join(run(capsys, tuned=tmp_path).split())
    assert f"Phantom, 4 blocks, 8 ghosts: 1.50 times the steps, {1.5 / row['break_even_time']:.2f} of the time" in shown
    path.write_text(json.dumps({"best": None}))
    with pytest.raises(ValueError, match="no phantom model that reached the loss"):
        run(capsys, tuned=tmp_path)


def test_json_is_the_whole_answer(capsys):
    actual = json.loads(run(capsys, json=True, goal="energy"))
    assert actual["energy_provenance"] == "modelled"
    rows = actual["candidates"]
    dense = [row["modelled_joules_per_step"] for row in rows if row["computes_the_dense_model"]]
    assert actual["best_of_the_dense_model"]["modelled_joules_per_step"] == min(dense)
    assert [row["devices"] for row in actual["scaling"]["tensor"]][:3] == [2, 4, 8]
    for row in rows:
        spent = row["compute_seconds"] + row["exposed_communication_seconds"] + row["idle_seconds"]
        assert row["step_seconds"] == pytest.approx(spent)
        assert row["modelled_joules_per_sample"] == pytest.approx(row["modelled_joules_per_step"] / 64)
        assert row["energy_gap"] == pytest.approx(row["modelled_joules_per_step"] / row["least_joules_per_step"] - 1)
        assert 0 < row["mfu"] < 1


def test_a_large_transformer_is_planned_with_stages_and_every_strategy_is_accounted_for(capsys):
    words = ["--like", "llama-3.1-8b", "--context", "4096", "--batch", "64", "--devices", "64", "--dtype", "bf16"]
    assert main(["plan", *words]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    assert "…" not in shown
    assert "kJ a step" in lines[0]
    for name in (*get_family("gpt").strategies, "tensor-2d", "caat-net"):
        assert any(line.startswith((name, f"Left out: {name}")) for line in lines), name


@pytest.mark.parametrize(("words", "message"), [("--hardware abacus", "'abacus'"), ("--memory-gib 0.001", "0.001")])
def test_an_impossible_transformer_is_one_line_and_exit_code_2(words, message, capsys):
    assert message in refused(capsys, "plan", *GPT_WORDS.split(), *words.split())
