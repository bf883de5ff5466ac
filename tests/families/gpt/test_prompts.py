"""Prompts and streamed text: characters come whole, and what is streamed is the text."""

import json
from pathlib import Path

import pytest
import torch

from phantom_parallel.families.gpt.prompts import Streamer, encode_prompt, find_tokenizer, read_prompt
from phantom_parallel.families.gpt.tokens import BPETokenizer, ByteTokenizer
from tests.families.gpt.sample import config_of

TEXT = "naïve ✓ 🙂 end"


def streamed(tokenizer, rows: list[list[int]]) -> tuple[list[str], list[str]]:
    pieces: list[str] = []
    streamer = Streamer(tokenizer, pieces.append)
    for step in zip(*rows, strict=True):
        streamer.add(torch.tensor(step))
    return pieces, streamer.finish()


def test_bytes_come_as_whole_characters():
    pieces, texts = streamed(ByteTokenizer(), [list(TEXT.encode())])
    assert texts == [TEXT]
    assert pieces == list(TEXT)


@pytest.mark.parametrize(
    "raw", [b"\xff", b"\xffab", b"a\xe2\x82", b"\xe2\x82a", b"\xff\xff\xff\xe2\x82\xac.", b"\xf0\x9f\x99\xe2\x9c\x93"]
)
def test_what_is_no_text_comes_out_as_it_is_decoded(raw):
    pieces, texts = streamed(ByteTokenizer(), [list(raw)])
    assert "".join(pieces) == raw.decode(errors="replace") == texts[0]


def test_the_first_row_is_streamed_and_all_are_kept():
    pieces, texts = streamed(ByteTokenizer(), [list(b"one"), list(b"two")])
    assert ("".join(pieces), texts) == ("one", ["one", "two"])


def test_a_padded_vocabulary():
    pieces, texts = streamed(ByteTokenizer(), [[97, 300, 98]])
    assert ("".join(pieces), texts) == ("ab", ["ab"])


def test_byte_pairs(tmp_path):
    pytest.importorskip("tokenizers")
    tokenizer = BPETokenizer.train((TEXT + "\n").encode() * 20, 300)
    pieces, texts = streamed(tokenizer, [tokenizer.encode(TEXT.encode()).tolist()])
    assert "".join(pieces) == TEXT == texts[0]
    model = tmp_path / "model"
    model.mkdir()
    assert isinstance(find_tokenizer(model), ByteTokenizer)
    tokenizer.save(tmp_path)  # as a training that has not come to its end leaves it
    assert isinstance(find_tokenizer(model), BPETokenizer)
    (tmp_path / "tokenizer.json").rename(model / "tokenizer.json")
    found = find_tokenizer(model)
    assert found.encode(TEXT.encode()).tolist() == tokenizer.encode(TEXT.encode()).tolist()
    with pytest.raises(ValueError, match=r"the prompt has a token \d+, but the model's vocabulary is 24"):
        encode_prompt(TEXT.encode(), found, config_of())


def tokenizer_json(**changes) -> dict:
    """A tokenizer of words, with changes of its parts."""
    return {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}} | changes


@pytest.mark.parametrize(
    "changes",
    [
        {"truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}},
        {
            "padding": {
                "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 1,
                "pad_type_id": 0, "pad_token": "b",
            }
        },
    ],
)  # fmt: skip
def test_a_tokenizer_of_a_file_neither_cuts_nor_pads(tmp_path, changes):
    pytest.importorskip("tokenizers")
    words = {"pre_tokenizer": {"type": "WhitespaceSplit"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json(**words | changes)))
    assert find_tokenizer(tmp_path).encode(b"a b b").tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, "the prompt '  ' has no tokens"),
        (
            {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 70_000}, "unk_token": "b"}},
            "the prompt has a token 70000, but the model's vocabulary is 24",
        ),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "c"}}, "tokenizer.json fails on a text: "),
        (
            {
                "pre_tokenizer": {
                    "type": "Split", "pattern": {"Regex": "( +)+$"}, "behavior": "Isolated", "invert": False,
                }
            },
            "tokenizer.json fails on a text: ",
        ),
    ],
    ids=["no tokens", "large number", "unknown word", "panic"],
)  # fmt: skip
def test_tokenizers_that_load_and_fail_later(tmp_path, changes, message):
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json(**changes)))
    prompt = b" " * 40 + b"x" if "pre_tokenizer" in changes else b"  "
    with pytest.raises(ValueError, match=message):
        encode_prompt(prompt, find_tokenizer(tmp_path), config_of())


@pytest.mark.parametrize("merge", ["a b", ["a", "b"]])
def test_merges_without_their_prefix_are_refused_before_the_library_aborts(tmp_path, merge):
    pytest.importorskip("tokenizers")
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [merge], "continuing_subword_prefix": "//"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json(model=model)))
    with pytest.raises(ValueError, match=r"tokenizer.json is not a readable tokenizer: the merge .*_prefix '//'"):
        find_tokenizer(tmp_path)


def test_prompts(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text(TEXT + "\n", encoding="utf-8")
    assert read_prompt(None, path) == TEXT.encode() + b"\n"
    assert read_prompt(TEXT, None) == TEXT.encode()
    assert encode_prompt(b"abc", ByteTokenizer(), config_of(vocab=256)).tolist() == [[97, 98, 99]]


@pytest.mark.parametrize(
    ("text", "raw", "message"),
    [
        (None, None, "give either a prompt or a file with the prompt"),
        ("a", b"a", "give either a prompt or a file with the prompt"),
        ("", None, "the prompt is empty, .* a new line is a neutral one"),
        (None, b"", "the prompt is empty"),
        (None, b"ab\xff", "prompt.txt is not text in UTF-8: invalid start byte at byte 2"),
    ],
)
def test_prompts_that_are_none(tmp_path, text, raw, message):
    path = tmp_path / "prompt.txt"
    if raw is not None:
        path.write_bytes(raw)
    with pytest.raises(ValueError, match=message):
        read_prompt(text, None if raw is None else path)


def test_prompt_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be read from .*nowhere.txt: No such file"):
        read_prompt(None, tmp_path / "nowhere.txt")
    with pytest.raises(ValueError, match=r"cannot be read from .*: Is a directory"):
        read_prompt(None, tmp_path)
    with pytest.raises(ValueError, match="/dev/zero is too long for a prompt: more than 67,108,864 bytes"):
        read_prompt(None, Path("/dev/zero"))
