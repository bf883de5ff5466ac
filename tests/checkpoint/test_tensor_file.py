"""Safetensors files written one tensor at a time, read by safetensors itself, and their digests."""

import hashlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from phantom_parallel.checkpoint import tensor_file
from phantom_parallel.checkpoint.tensor_file import TensorFile, TensorLayout, is_digest, write_tensor_file, wrong_bytes

TENSORS = {
    "matrix": torch.arange(35, dtype=torch.float32).view(5, 7),
    "transposed": torch.arange(6, dtype=torch.float64).view(2, 3).t(),
    "half": torch.randn(3).bfloat16(),
    "step": torch.tensor(7.0),
    "flags": torch.tensor([True, False, True]),
    "counts": torch.arange(3),
    "none": torch.empty(0, 4),
}


def written(path, tensors=TENSORS):
    layouts = [TensorLayout(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    return write_tensor_file(path, layouts, tensors.__getitem__, {"format": "pt"})


def test_safetensors_reads_what_was_written(tmp_path):
    written(tmp_path / "file")
    found = load_file(tmp_path / "file")
    assert found.keys() == TENSORS.keys()
    for name, expected in TENSORS.items():
        assert found[name].dtype == expected.dtype
        assert torch.equal(found[name], expected)
    with safe_open(tmp_path / "file", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("block", [1, 60, 1 << 20])
def test_rows_are_read_from_what_safetensors_wrote(tmp_path, monkeypatch, block):
    monkeypatch.setattr(tensor_file, "_BLOCK", block)
    save_file({name: tensor.contiguous() for name, tensor in TENSORS.items()}, tmp_path / "file")
    file = TensorFile(tmp_path / "file")
    for name, first, rows in (("matrix", 1, 4), ("half", 2, 1), ("transposed", 0, 3), ("none", 0, 0)):
        found = torch.empty_like(TENSORS[name][first : first + rows])
        for done, values in file.read_rows(name, first, rows):
            found[done : done + len(values)] = values
        assert torch.equal(found, TENSORS[name][first : first + rows])
    assert [(done, values.item()) for done, values in file.read_rows("step", 0, 1)] == [(0, 7.0)]
    file.close()


def test_the_digest_is_that_of_the_files_segments(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "SEGMENT", 100)
    digest = written(tmp_path / "file")
    data = (tmp_path / "file").read_bytes()
    assert digest["bytes"] == len(data)
    assert digest["sha256"] == [hashlib.sha256(data[i : i + 100]).hexdigest() for i in range(0, len(data), 100)]
    assert is_digest(digest)


def test_any_changed_byte_is_noticed_by_the_rank_that_has_its_segment(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "SEGMENT", 64)
    files = {"file": written(tmp_path / "file")}
    data = (tmp_path / "file").read_bytes()
    assert all(wrong_bytes(tmp_path, files, rank, 3) is None for rank in range(3))
    for index in range(0, len(data), 7):
        (tmp_path / "file").write_bytes(data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :])
        noticed = [wrong_bytes(tmp_path, files, rank, 3) for rank in range(3)]
        assert [rank for rank in range(3) if noticed[rank]] == [index // 64 % 3]
        assert f"{tmp_path / 'file'} has changed since it was written" in noticed[index // 64 % 3]
    (tmp_path / "file").write_bytes(data + b"x")
    assert f"has {len(data) + 1} bytes, {len(data)} were written" in wrong_bytes(tmp_path, files)


def test_a_dtype_without_a_name_in_the_format_is_an_error():
    with pytest.raises(ValueError, match=r"w has dtype torch.complex64, which cannot be saved; supported are"):
        TensorLayout("w", (2,), torch.complex64)
