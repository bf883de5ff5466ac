"""``phantom eval`` as a user calls it, and its windows against a reference that takes one token at a time."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from phantom_parallel import FFN, FFNConfig, convert, save_model
from phantom_parallel.cli.main import main
from phantom_parallel.infer.evaluate import EvalConfig, evaluate_text
from tests.cli.commands import answered, refused
from tests.conversion.test_api import pretrained

VOCAB = 11


def table_logits(tokens):
    """Logits that depend on all tokens so far, and on how many they are."""
    table = torch.randn(97, VOCAB, generator=torch.Generator().manual_seed(1))
    return table[(tokens.cumsum(1) + torch.arange(tokens.shape[1])) % 97]


@pytest.mark.parametrize(("length", "stride", "batch"), [(8, 8, 3), (5, 2, 8), (100, None, 1)])
def test_every_token_is_predicted_once_from_the_window_that_reaches_it_first(length, stride, batch):
    tokens = torch.randint(VOCAB, (31,), generator=torch.Generator().manual_seed(0))
    config = EvalConfig(model=Path("m"), data=Path("t"), length=length, stride=stride, batch=batch)
    measured = evaluate_text(table_logits, tokens, b"x" * 40, 100, config, lambda done, total: None)
    nats, width, step = 0.0, min(length, 30), stride or min(length, 30) // 2
    for target in range(1, 31):
        end = width
        while end < target:
            end = min(end + step, 30)
        before = tokens[None, end - width : target]
        nats -= float(table_logits(before)[0, -1].log_softmax(-1)[tokens[target]])
    assert measured["nats"] == pytest.approx(nats / 30)
    assert measured["perplexity"] == pytest.approx(math.exp(nats / 30))
    assert measured["bits_per_byte"] == pytest.approx(nats / math.log(2) / 40)
    assert measured["tokens"] == 30


def test_the_accuracy_is_that_of_the_training(tmp_path, capsys):
    train = "train ffn --data digits --width 64 --depth 1 --strategy dense --steps 20 --ranks 1 --out"
    summary = answered(capsys, *train.split(), tmp_path / "run")
    measured = answered(capsys, "eval", "--model", tmp_path / "run" / "model")["model"]
    assert measured["accuracy"] == pytest.approx(summary["accuracy"])
    assert measured["loss"] == pytest.approx(summary["eval_loss"], rel=1e-5)
    assert measured["rows"] == 224


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_relative_error_of_arrays_is_the_mean_over_rows(tmp_path, capsys, ranks):
    torch.manual_seed(0)
    model = FFN(FFNConfig(width=16, depth=2, blocks=4, ghosts=2))
    save_model(model, tmp_path / "model")
    x, y = torch.randn(2, 20, 16)
    np.savez(tmp_path / "data.npz", x=x.numpy(), y=y.numpy())
    error = (model(x) - y).detach()
    data = "--data", tmp_path / "data.npz", "--ranks", ranks, "--batch", 7
    measured = answered(capsys, "eval", "--model", tmp_path / "model", *data)["model"]
    assert measured["relative_error"] == pytest.approx(float((error.norm(dim=1) / y.norm(dim=1)).mean()))
    assert measured["loss"] == pytest.approx(float(error.square().mean()))
    assert "accuracy" not in measured


WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "while", "it", "rains"]


def tokenizer_of_words():
    """A tokenizer of transformers."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(sorted(set(WORDS)))}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="rains")


def test_a_model_of_transformers_beside_the_dense_one(tmp_path, capsys):
    model, tokenizer = pretrained("llama", max_position_embeddings=64), tokenizer_of_words()
    ids = torch.tensor([tokenizer.encode(" ".join(WORDS * 3))])
    expected = {"against": float(model(ids, labels=ids).loss.detach())}
    (tmp_path / "text.txt").write_text(" ".join(WORDS * 3))
    for name in ("against", "model"):
        if name == "model":
            convert(model, [torch.randint(60, (4, 60))], blocks=4, ghosts=2)
            expected["model"] = float(model(ids, labels=ids).loss.detach())
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    both = "--model", tmp_path / "model", "--against", tmp_path / "against", "--data", tmp_path / "text.txt"
    measured = answered(capsys, "eval", *both)
    for name, loss in expected.items():
        assert measured[name]["nats"] == pytest.approx(loss, rel=1e-5)
        assert measured[name]["tokens"] == len(WORDS) * 3 - 1
    assert main(["eval", *map(str, both)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [[f"{tmp_path.name}", "perplexity"], ["against", "perplexity"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "give --data, with arrays x and y"), (["--data", "gone"], "there is no data"), (["--batch", "0"], "batch")],
)
def test_a_mistake_is_one_line(tmp_path, capsys, arguments, message):
    save_model(FFN(FFNConfig(width=16, depth=1, blocks=4, ghosts=2)), tmp_path / "model")
    assert message in refused(capsys, "eval", "--model", tmp_path / "model", *arguments)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tasks_of_lm_eval_for_folders_of_transformers_and_our_own(tmp_path, capsys, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    model, tokenizer = pretrained("llama", max_position_embeddings=64, vocab_size=16), tokenizer_of_words()
    model.save_pretrained(tmp_path / "hf")
    tokenizer.save_pretrained(tmp_path / "hf")
    choices, correct = ["fox", "dog", "quick"], []
    documents = [{"text": " ".join(WORDS[i : i + 3]), "label": i % 3} for i in range(9)]
    for document in documents:
        logits = model(torch.tensor([tokenizer.encode(document["text"])])).logits[0, -1]
        correct.append(int(logits[tokenizer.convert_tokens_to_ids(choices)].argmax()) == document["label"])
    assert 0 < sum(correct) < 9
    (tmp_path / "tasks").mkdir()
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, documents)))
    task = {
        "task": "words", "dataset_path": "json", "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}},
        "output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_choice": choices,
        "doc_to_target": "label", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    (tmp_path / "tasks" / "words.yaml").write_text(json.dumps(task))
    assert main(["model", "import", "--from", str(tmp_path / "hf"), "--out", str(tmp_path / "own")]) == 0
    capsys.readouterr()
    tasks = "--tasks", "words", "--task-folder", tmp_path / "tasks"
    for ranks in (1, 2):
        both = "--model", tmp_path / "hf", "--against", tmp_path / "own", "--ranks", ranks
        result = answered(capsys, "eval", *both, *tasks)
        for name, folder in (("model", "hf"), ("against", "own")):
            assert result[name] == {"folder": str(tmp_path / folder), "words acc": pytest.approx(sum(correct) / 9)}
    assert main(["eval", "--model", str(tmp_path / "own"), "--tasks", "nothing"]) == 2
    assert "lm_eval has no task nothing" in capsys.readouterr().err  # among what lm_eval prints
    assert main(["eval", "--model", str(tmp_path / "own"), *map(str, tasks), "--limit", "3"]) == 0
    assert capsys.readouterr().out == f"own  words acc {sum(correct[:3]) / 3:.4f}\n"
