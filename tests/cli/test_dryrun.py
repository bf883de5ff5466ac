import json

import pytest

from phantom_parallel.checkpoint.model import save_model
from phantom_parallel.cli.main import main
from phantom_parallel.cli.options import model_defaults
from phantom_parallel.cost.planner import Layout, ModelSizes
from phantom_parallel.families.gpt.config import GPTConfig
from phantom_parallel.families.gpt.model import GPT
from tests.cli.commands import answered, refused

SMALL = ["gpt", "--vocab", "64", "--dim", "64", "--layers", "2", "--heads", "8", "--hidden", "64"]
SMALL += ["--context", "16", "--batch", "4", "--ranks", "4"]


def test_the_table_says_that_formulas_agree(capsys):
    assert main(["dryrun", "--width", "64", "--depth", "1", "--blocks", "4", "--ranks", "8", "--ghosts", "4"]) == 0
    text = capsys.readouterr().out
    assert "phantom on 8 ranks, 4 blocks of 2 ranks, 4 ghosts, rank 0" in text
    assert "inside blocks of 2 ranks" in text
    assert "Formulas and code agree in every term" in text
    assert "…" not in text
    assert "│" not in text


def test_bytes_inside_blocks_and_between_them_are_told_apart(capsys):
    """1,024 ranks, 8 in each of 128 blocks: a rank holds 64 of its block's 512 features and 8 of its 64 ghosts."""
    shared = ["dryrun", "--strategy", "phantom", "--width", "65536", "--depth", "2"]
    shared += ["--blocks", "128", "--ranks", "1024", "--ghosts", "64"]
    actual = answered(capsys, *shared, "--rank", "9")
    assert actual["formulas_agree"]
    row = 64 * 4  # bytes of a word of each row
    features, ghosts, between = 7 * 64 * row, 7 * 128 * 8 * row, 127 * 8 * row
    assert actual["sent_bytes_inside_blocks"] == {
        "forward": 2 * (features + ghosts),
        "backward": features + 2 * ghosts,  # the first layer's input needs no gradient
        "sync": 0,
    }
    for phase in ("forward", "backward"):
        assert actual["sent_bytes"][phase] - actual["sent_bytes_inside_blocks"][phase] == 2 * between


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--blocks", "7"], "blocks=7 does not divide in_features=16384"),
        (["--dp", "3"], "dp=3 does not divide batch=64"),
        (["--rank", "99"], "from 0 to 15, got 99"),
        ([*SMALL, "--strategy", "fsdp", "--mode", "decode"], "fsdp is for training"),
        ([*SMALL, "--ghosts", "4", "--communication", "--mode", "decode"], "--mode decode"),
        (["--like", "llama-3.1-9b"], "did you mean 'llama-3.1-8b'?"),
        (["--like", "mistral-7b", "--model", "x"], "leave one out"),
        (["--model", "nowhere"], "config.json is not readable"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, arguments, message):
    assert message in refused(capsys, "dryrun", *arguments)


PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "smollm2-135m": 134_515_008,
}


def test_well_known_models_have_their_published_numbers_of_parameters(capsys):
    for name, parameters in PUBLISHED.items():
        family, sizes = model_defaults(None, ["--like", name])
        assert ModelSizes(family, sizes).shape(Layout("dense", 1, 1), batch=1).model_parameters == parameters
    counted = answered(capsys, "dryrun", "--like", name, "--strategy", "dense", "--ranks", 1, "--context", 16)
    assert counted["formulas_agree"]
    assert counted["model_parameters"] == PUBLISHED[name]
    assert counted["settings"]["context"] == 16  # an option replaces what the model has


def test_sizes_come_from_the_config_of_a_folder(tmp_path, capsys):
    """Qwen2 with a bias after queries, keys and values, beside the parameters that its tensors have."""
    sizes = {"vocab_size": 96, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6}
    sizes |= {"num_key_value_heads": 3, "intermediate_size": 48, "max_position_embeddings": 32}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **sizes}))
    counted = answered(capsys, "dryrun", "--model", tmp_path, "--strategy", "megatron", "--batch", 2)
    layer = 24 * (24 + 2 * 12) + 24 + 2 * 12 + 24 * 24 + 3 * 24 * 48 + 2 * 24
    assert counted["model_parameters"] == 2 * 96 * 24 + 2 * layer + 24
    assert (counted["settings"]["ranks"], counted["settings"]["context"]) == (3, 32)  # ranks that its heads allow
    save_model(GPT(GPTConfig(64, 128, 1, 4, context=8, strategy="dense")), tmp_path / "ours")
    settings = answered(capsys, "dryrun", "--model", tmp_path / "ours")["settings"]
    assert (settings["vocab"], settings["dim"], settings["ranks"], settings["blocks"]) == (64, 128, 4, 4)


def test_communication_is_a_table_or_json(capsys):
    command = ["dryrun", *SMALL, "--ghosts", "4", "--communication"]
    rows = answered(capsys, *command)
    whole = sum(row["sent_bytes"] for row in rows if row["profile"] == "megatron" and row["phase"] == "forward")
    assert whole == 5 * (2 * 3 * 64 * 64 * 4 // 4) + 3 * 64 * 3 * 4
    assert main(command) == 0
    shown = set(capsys.readouterr().out.split())
    assert {row["phase"] for row in rows} | {row["profile"] for row in rows} <= shown
