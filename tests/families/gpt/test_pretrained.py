"""Pretrained models in and out: the same function as in transformers, and refusals by name."""

import json
import shutil

import pytest
import torch

from phantom_parallel import GPT, GPTConfig, load_model, save_model
from phantom_parallel.cli.main import main
from phantom_parallel.families.gpt.generation import generate
from phantom_parallel.families.gpt.pretrained import export_model, import_model
from phantom_parallel.families.gpt.text import stop_tokens
from tests.cli.commands import answered, refused
from tests.families.gpt.pretrained_models import LLAMA3, TEMPLATE, greedy, make_pretrained

transformers = pytest.importorskip("transformers")

KINDS = {
    "llama": {"kind": "llama"},
    "llama-tied-llama3": {"kind": "llama", "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    "llama-linear": {"kind": "llama", "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
    "mistral": {"kind": "mistral", "rms_norm_eps": 1e-3, "sliding_window": None},
    "qwen2": {"kind": "qwen2", "tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder of a pretrained model without stop tokens."""
    path = tmp_path_factory.mktemp("pretrained") / "hf"
    make_pretrained(path, eos_token_id=None)
    return path


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_logits_and_greedy_tokens_equal_those_of_transformers(tmp_path, settings):
    shard = "40KB" if settings["kind"] == "llama" else "5GB"  # several files with an index
    reference = make_pretrained(tmp_path / "hf", shard=shard, **settings)
    import_model(tmp_path / "hf", tmp_path / "model")
    model = load_model(tmp_path / "model")
    tokens = torch.randint(300, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(tokens).logits
    assert expected.std() > 0.3  # large enough to tell functions apart
    torch.testing.assert_close(model.logits(tokens), expected, atol=1e-4, rtol=0)
    for row in tokens[:, :5].split(1):
        assert generate(model, row, tokens=12).tokens[0].tolist() == greedy(reference, row, 12)


@pytest.mark.parametrize("kind", ["llama-tied-llama3", "qwen2"])
def test_a_dense_model_survives_export(tmp_path, kind):
    reference = make_pretrained(tmp_path / "hf", **KINDS[kind])
    import_model(tmp_path / "hf", tmp_path / "model")
    export_model(tmp_path / "model", tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ours, theirs = again.state_dict(), reference.state_dict()
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=0, rtol=0)
    tokens = torch.arange(30)[None]
    torch.testing.assert_close(again(tokens).logits, reference(tokens).logits)
    for file in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / file).read_text() == (tmp_path / "hf" / file).read_text()


def test_stop_tokens_survive_import_and_export(tmp_path, source):
    for where, ends in (("config.json", 7), ("config.json", [5, 7]), ("generation_config.json", [5, 7])):
        folder, model, out = (tmp_path / f"{where}-{ends}" / name for name in ("hf", "model", "out"))
        shutil.copytree(source, folder)
        settings = {name: json.loads((folder / name).read_text()) for name in ("config.json", "generation_config.json")}
        settings[where]["eos_token_id"] = ends
        for name, values in settings.items():
            (folder / name).write_text(json.dumps(values))
        import_model(folder, model)
        assert stop_tokens(model) == ([ends] if ends == 7 else ends)
        export_model(model, out)
        exported = transformers.AutoModelForCausalLM.from_pretrained(out)
        assert exported.generation_config.eos_token_id == exported.config.eos_token_id == ends


@pytest.mark.parametrize("bias", [False, True])
def test_a_phantom_model_is_exported_as_the_dense_one_that_it_equals(tmp_path, bias):
    config = GPTConfig(
        vocab=96, dim=48, layers=2, heads=6, kv_heads=3, hidden=96, context=32, blocks=3, ghosts=2, qkv_bias=bias,
        layer_ghosts=((1, 2, 3, 4), (2, 5, 1, 7)),
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT(config, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        if name.endswith(("norm", "bias")):
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    save_model(model, tmp_path / "model")
    export_model(tmp_path / "model", tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    tokens = torch.arange(20)[None]
    # transformers computes rotations in float32, whatever the model's dtype.
    torch.testing.assert_close(loaded(tokens).logits, model.logits(tokens), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_hidden_layers": 3}, "model.layers.2"),
        ({"intermediate_size": 48}, "has shape"),
    ],
)
def test_what_is_not_supported_is_refused_by_name_before_work(tmp_path, capsys, source, change, named):
    shutil.copytree(source, tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    message = refused(capsys, "model", "import", "--from", tmp_path / "hf", "--out", tmp_path / "model")
    assert named in message
    assert str(tmp_path / "hf") in message
    assert not (tmp_path / "model").exists()


def test_pickles_and_missing_files_are_refused(tmp_path, source):
    folder = tmp_path / "hf"
    shutil.copytree(source, folder)

    def refused(named: str, path=folder) -> None:
        with pytest.raises(ValueError, match=named):
            import_model(path, tmp_path / "model")

    (folder / "tokenizer.json").unlink()
    refused("tokenizer.json")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused("pickle")
    (folder / "model.safetensors").write_bytes(b"nonsense")
    refused("safetensors")
    refused("there is no folder", tmp_path / "none")


def test_links_to_private_files_are_not_copied(tmp_path, source):
    (tmp_path / "private").write_text("user:secret:1000\n")
    import_model(source, tmp_path / "good")
    for name in ("special_tokens_map.json", "generation_config.json", "chat_template.jinja"):
        for copied, action, out in ((source, import_model, "model"), (tmp_path / "good", export_model, "out")):
            folder = tmp_path / f"{out}-{name}"
            shutil.copytree(copied, folder)
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(tmp_path / "private")
            with pytest.raises(ValueError, match=name):
                action(folder, tmp_path / out)
            assert not (tmp_path / out).exists()


def test_commands_from_a_folder_to_text_that_ends_where_that_of_transformers_does_and_back(tmp_path, capsys):
    reference = make_pretrained(tmp_path / "hf", eos_token_id=None)
    model, out = str(tmp_path / "model"), str(tmp_path / "out")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "hf" / "tokenizer.json"))
    tokenizer.chat_template = TEMPLATE
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "ghost"}], add_generation_prompt=True)
    prompt = torch.tensor([asked["input_ids"]])
    reference.generation_config.eos_token_id = [greedy(reference, prompt, 12)[4], 299]
    reference.generation_config.save_pretrained(tmp_path / "hf")
    settings = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    expected = reference.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[:, prompt.shape[1] :]
    assert expected.shape[1] < 12
    assert main(["model", "import", "--from", str(tmp_path / "hf"), "--out", model, "--context", "48"]) == 0
    assert load_model(model).config.context == 48
    actual = answered(capsys, "generate", "--model", model, "--prompt", "ghost", "--chat", "--tokens", 12)
    assert actual["tokens"] == expected.tolist()
    assert main(["model", "export", "--model", model, "--out", out]) == 0
    assert transformers.AutoModelForCausalLM.from_pretrained(out).config.model_type == "llama"
    for template in ("{{ 1 / 0 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"):
        (tmp_path / "model" / "chat_template.jinja").write_text(template)
        message = refused(capsys, "generate", "--model", model, "--prompt", "ghost", "--chat")
        assert "model/chat_template.jinja cannot be used: " in message
