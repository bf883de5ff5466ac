"""Prompts and streamed text: characters come whole, and what is streamed is the text."""

import itertools
import json

import pytest

from phantom_parallel.families.gpt.text import BPETokenizer, ByteTokenizer, RowText, encode_prompt, find_tokenizer

TEXT = "naïve ✓ 🙂 end"


def streamed(tokenizer, tokens, **stops) -> tuple[list[str], RowText]:
    """The pieces of text that become visible one after the other, and the row."""
    row, pieces = RowText(tokenizer, **stops), [""]
    for token in tokens:
        row.add(token)
        pieces.append(row.visible)
        if row.ended:
            break
    row.ended = True
    pieces.append(row.visible)
    return [after[len(before) :] for before, after in itertools.pairwise(pieces) if after != before], row


def test_bytes_become_visible_as_whole_characters_up_to_a_stop_token():
    pieces, row = streamed(ByteTokenizer(), TEXT.encode())
    assert (pieces, row.text) == (list(TEXT), TEXT)
    for raw in (b"\xffab", b"a\xe2\x82", b"\xe2\x82a", b"\xff\xff\xff\xe2\x82\xac.", b"\xf0\x9f\x99\xe2\x9c\x93"):
        pieces, row = streamed(ByteTokenizer(), raw)
        assert "".join(pieces) == raw.decode(errors="replace") == row.text
    assert streamed(ByteTokenizer(), [97, 300, 98])[1].text == "ab"  # a padded vocabulary
    pieces, row = streamed(ByteTokenizer(), [97, 98, 300, 99], stop_tokens=[300])
    assert (pieces, row.text, row.tokens) == (["a", "b"], "ab", [97, 98, 300])


def test_a_stop_text_never_becomes_visible():
    pieces, row = streamed(ByteTokenizer(), b"a \nUs. \nUser: b", stop_texts=["\nUser:", "zzz"])
    assert (pieces, row.text, row.ended) == (["a", " ", "\nUs.", " "], "a \nUs. ", True)
    pieces, row = streamed(ByteTokenizer(), b"a \nUs", stop_texts=["\nUser:"])  # only the beginning of one
    assert (pieces, row.text) == (["a", " ", "\nUs"], "a \nUs")


def test_byte_pairs(tmp_path):
    pytest.importorskip("tokenizers")
    tokenizer = BPETokenizer.train((TEXT + "\n").encode() * 20, 300)
    pieces, row = streamed(tokenizer, tokenizer.encode(TEXT.encode()).tolist())
    assert "".join(pieces) == TEXT == row.text
    model = tmp_path / "model"
    model.mkdir()
    assert isinstance(find_tokenizer(model), ByteTokenizer)
    tokenizer.save(tmp_path)  # as a training that has not come to its end leaves it
    assert isinstance(find_tokenizer(model), BPETokenizer)
    (tmp_path / "tokenizer.json").rename(model / "tokenizer.json")
    actual = find_tokenizer(model)
    assert actual.encode(TEXT.encode()).tolist() == tokenizer.encode(TEXT.encode()).tolist()
    with pytest.raises(ValueError, match="vocabulary is 24"):
        encode_prompt(TEXT, actual, 24)


def test_a_tokenizer_of_a_file_does_not_cut(tmp_path):
    pytest.importorskip("tokenizers")
    cutting = {"truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}}
    words = {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}, "version": "1.0"}
    words["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(words | cutting))
    assert find_tokenizer(tmp_path).encode(b"a b b").tolist() == [0, 1, 1]
