"""Text as tokens: which files, which windows, what is held out, what is kept on disk."""

from pathlib import Path

import numpy as np
import pytest
import torch

from phantom_parallel.families.gpt import text as text_module
from phantom_parallel.families.gpt.config import GPTTrainConfig
from phantom_parallel.families.gpt.text import BPETokenizer, open_text, windows

LINES = "".join(f"line {number} of süß text\n" for number in range(400))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def config(data: Path | str, **changes) -> GPTTrainConfig:
    usual = {"dim": 32, "layers": 1, "heads": 4, "context": 16, "blocks": 4, "ghosts": 2, "batch": 8}
    return GPTTrainConfig.of(**usual | {"data": str(data)} | changes)


def written(folder: Path, text: str = LINES) -> Path:
    path = folder / "some.txt"
    path.write_text(text)
    return path


def lines(tokens) -> list[str]:
    return bytes(tokens).decode().splitlines(keepends=True)


def test_bytes_are_all_there_and_a_tenth_in_whole_lines_is_held_out(tmp_path):
    text = open_text(config(written(tmp_path)))
    training, held_out = lines(text.training), lines(text.held_out)
    assert sorted(training + held_out) == sorted(LINES.splitlines(keepends=True))
    assert len(held_out) == pytest.approx(len(training) / 9, rel=0.2)
    assert not set(training) & set(held_out)
    numbers = [int(line.split()[1]) for line in held_out]
    assert numbers[0] < 200 < numbers[-1]  # of both halves
    assert numbers == sorted(numbers)


def test_files_of_a_folder_come_in_the_order_of_their_paths_up_to_the_limit(tmp_path):
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    for name, letter in (("c.txt", "c"), ("b/z.txt", "z"), ("a.txt", "a"), ("a.md", "!")):
        (folder / name).write_text(letter * 200)
    assert text_module._read(config(folder)) == b"\n".join([b"a" * 200, b"z" * 200, b"c" * 200])
    assert text_module._read(config(folder, max_bytes=250)) == b"a" * 200 + b"\n" + b"z" * 49
    assert set(bytes(open_text(config(folder, pattern="*.md")).training)) == {ord("!")}


def test_a_window_is_tokens_and_those_after_them(tmp_path):
    text = open_text(config(written(tmp_path)))
    tokens, targets = windows(text.training, torch.tensor([0, 100]), 16)
    assert bytes(tokens[1].tolist()) == LINES.encode()[100:116]
    assert bytes(targets[1].tolist()) == LINES.encode()[101:117]
    assert tokens.dtype == torch.int64


def test_the_seed_and_the_step_decide_the_windows_and_all_fit(tmp_path):
    settings = config(written(tmp_path, LINES[:300]), context=20)
    text = open_text(settings)
    drawn = torch.cat([text.starts(step, settings) for step in range(400)])
    assert (int(drawn.min()), int(drawn.max())) == (0, len(text.training) - 21)
    windows(text.training, drawn, 20)  # none beyond the end
    assert torch.equal(text.starts(3, settings), open_text(settings).starts(3, settings))
    assert not torch.equal(text.starts(3, settings), text.starts(4, settings))
    assert not torch.equal(text.starts(3, settings), text.starts(3, settings.updated(seed=1)))


def test_tokens_are_cached_on_disk_and_mapped(tmp_path, cache, monkeypatch):
    settings = config(written(tmp_path))
    first = open_text(settings)
    assert isinstance(first.training, np.memmap)
    assert (cache / "phantom-parallel" / "text" / first.digest).is_dir()
    monkeypatch.delattr(text_module, "split_text")
    assert np.array_equal(open_text(settings).training, first.training)


def test_a_byte_pair_encoding_gives_back_the_text_and_is_shorter(tmp_path):
    pytest.importorskip("tokenizers")
    settings = config(written(tmp_path), tokenizer="bpe", vocab=300)
    text = open_text(settings)
    tokenizer = text.tokenizer
    assert isinstance(tokenizer, BPETokenizer)
    assert tokenizer.vocab == 300
    parts = tuple(tokenizer.decode(tokens).encode() for tokens in (text.training, text.held_out))
    assert parts == text_module.split_text(LINES.encode())
    assert len(text.training) < 0.6 * len(LINES)
    assert int(text.training.max()) < 300
    assert tokenizer.decode(tokenizer.encode("nie gesehen: ∑ 語".encode())) == "nie gesehen: ∑ 語"
    assert np.array_equal(open_text(settings).training, text.training)  # from disk
