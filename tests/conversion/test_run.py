"""``phantom model convert`` on models of the families: the same function on ranks, a report, and clear errors."""

import json
import random

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel import FFN, GPT, FFNConfig, GPTConfig, load_model, save_model
from phantom_parallel.cli.main import main
from tests.cli.commands import answered, refused

TEXT = "Every block keeps its features and sends a few ghosts to the others. " * 300


def trained_gpt(folder, **settings):
    """A small dense GPT after a few steps on the text, so that its activations have a structure."""
    sizes = {"vocab": 256, "dim": 32, "layers": 2, "heads": 8, "hidden": 32, "context": 64, "qkv_bias": True}
    torch.manual_seed(0)
    model = GPT(GPTConfig(**(sizes | {"strategy": "dense"} | settings)))
    tokens = torch.tensor(list(TEXT.encode()[: 16 * 65])).view(16, 65)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(30):
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    save_model(model, folder)
    return model


def command(model, text, out, *extra):
    return ["model", "convert", "--model", str(model), "--calibration", str(text), "--out", str(out), "--blocks", "4",
            "--rows", "1024", "--length", "64", *extra]  # fmt: skip


def logits_on_ranks(path, tokens, size):
    return load_model(path, mesh=init_device_mesh("cpu", (size,))).logits(tokens).detach()


def test_a_gpt_converts_and_computes_the_same_on_ranks(tmp_path, capsys, ranks):
    dense = trained_gpt(tmp_path / "dense", tie_embeddings=True)
    (tmp_path / "text.txt").write_text(TEXT)
    actual = []
    for ghosts in (4, 8):  # 8 are all features of a block
        arguments = command(tmp_path / "dense", tmp_path / "text.txt", tmp_path / f"p{ghosts}", "--ghosts", str(ghosts))
        actual.append(answered(capsys, *arguments))
    losses = [result["loss"] for result in actual]
    assert losses[-1] == pytest.approx(actual[0]["dense_loss"], abs=1e-4)
    assert losses[0] > losses[-1] + 0.01
    model = load_model(tmp_path / "p4")
    assert model.config.strategy == "phantom"
    assert model.config.layer_ghosts == ((4, 4, 4, 4),) * 2
    stored = json.loads((tmp_path / "p4" / "conversion.json").read_text())
    assert stored["loss"] == pytest.approx(losses[0])
    assert len(stored["groups"]) == 8
    assert all(0 <= group["relative_error"] < 1 for group in stored["groups"])
    tokens = torch.tensor([list(TEXT.encode()[:20])])
    expected = model.logits(tokens)
    for logits in ranks(2)(logits_on_ranks, tmp_path / "p4", tokens, 2):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert main(["generate", "--model", str(tmp_path / "p8"), "--prompt", "Every", "--tokens", "3"]) == 0
    capsys.readouterr()
    torch.testing.assert_close(load_model(tmp_path / "p8").logits(tokens), dense.logits(tokens), atol=1e-3, rtol=0)


def test_a_larger_budget_has_a_lower_loss_and_a_bound_on_the_loss_holds(tmp_path, capsys):
    trained_gpt(tmp_path / "dense")
    (tmp_path / "text.txt").write_text(TEXT)
    model, text = tmp_path / "dense", tmp_path / "text.txt"
    losses = []
    for budget in (0.5, 0.8):
        actual = answered(capsys, *command(model, text, tmp_path / f"p{budget}", "--budget", budget))
        assert actual["kept"] <= budget
        assert len({group["ghosts"] for group in actual["groups"]}) > 1
        losses.append(actual["loss"])
    assert losses == sorted(losses, reverse=True)
    bounded = answered(capsys, *command(model, text, tmp_path / "q", "--max-loss", "0.2"))
    assert bounded["loss"] <= bounded["dense_loss"] + 0.2
    assert bounded["kept"] < 1
    assert not list(tmp_path.glob(".*converting"))


def test_a_feed_forward_network_converts_by_the_same_command(tmp_path, capsys):
    torch.manual_seed(0)
    dense = FFN(FFNConfig(width=32, depth=3, strategy="tensor"))
    save_model(dense, tmp_path / "dense")
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(600, 8)) @ rng.normal(size=(8, 32)) + 0.1 * rng.normal(size=(600, 32))).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    losses = []
    for ghosts in (4, 8):
        out = tmp_path / f"p{ghosts}"
        arguments = command(tmp_path / "dense", tmp_path / "x.npy", out, "--ghosts", ghosts)
        losses.append(answered(capsys, *arguments)["loss"])
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 1e-8
    rows = torch.from_numpy(x[:5])
    torch.testing.assert_close(load_model(tmp_path / "p8")(rows), dense(rows), atol=1e-4, rtol=1e-4)
    arguments = command(tmp_path / "dense", tmp_path / "x.npy", tmp_path / "b", "--budget", "0.5")
    assert "the same ghosts" in refused(capsys, *arguments)


def test_mistakes_are_named_before_the_work(tmp_path, capsys):
    torch.manual_seed(0)
    config = {"vocab": 256, "dim": 32, "layers": 1, "heads": 4, "hidden": 64, "context": 64}
    save_model(GPT(GPTConfig(**config, strategy="dense")), tmp_path / "dense")
    save_model(GPT(GPTConfig(**config, blocks=4, ghosts=2)), tmp_path / "phantom")
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "short.txt").write_text(TEXT[:200])
    model, text, out = tmp_path / "dense", tmp_path / "text.txt", tmp_path / "p"
    cases = [
        (command(model, text, out), "give one of ghosts, budget and max_loss"),
        (command(model, text, out, "--ghosts", "9"), "ghosts=9 is larger"),
        (command(model, tmp_path / "short.txt", out, "--ghosts", "2"), "too few"),
        (command(model, tmp_path / "none.txt", out, "--ghosts", "2"), "there is no text"),
        (command(tmp_path / "phantom", text, out, "--ghosts", "2"), "phantom model already"),
        (command(tmp_path / "none", text, out, "--ghosts", "2"), "not a model folder"),
        (command(model, text, model, "--ghosts", "2"), "exists"),
        (command(model, text, model, "--ghosts", "2", "--overwrite"), "which is read: choose another folder"),
    ]
    for arguments, message in cases:
        assert message in refused(capsys, *arguments)
    assert not out.exists()


@pytest.mark.slow
def test_the_benchmark_of_an_encoder_heals_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    from benchmarks import encoder, tables

    words = [f"w{index}" for index in range(60)]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    tokenizer = transformers.BertTokenizerFast(vocab={word: index for index, word in enumerate(vocabulary)})
    tokenizer.save_pretrained(tmp_path / "bert")
    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=len(vocabulary), initializer_range=0.3, **sizes)
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    passages = (" ".join(random.Random(seed).choices(words, k=8)) for seed in range(300))
    (tmp_path / "text.txt").write_text("\n\n".join(passages))
    folders = ["--model", str(tmp_path / "bert"), "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path)]
    encoder.main([*folders, "--rows", "1000", "--steps", "20", "--batch", "8"])
    actual = json.loads((tmp_path / "encoder.json").read_text())
    assert actual["converted"]["mean"] < actual["healed"]["mean"] < 1
    assert actual["kept"] <= 0.67
    assert f"| healed | {actual['healed']['mean']:.3f} |" in tables.TABLES["encoder"](tmp_path / "encoder.json")
