"""Inputs read from files: the right rows and features, and every file that cannot be read."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from phantom_parallel.infer.inputs import open_inputs

X = np.arange(7 * 6, dtype=np.float32).reshape(7, 6)


def write(path, array):
    if path.name.endswith(".npz"):
        (np.savez_compressed if "compressed" in path.name else np.savez)(path, y=array[:1], x=array)
    elif path.suffix == ".npy":
        np.save(path, array)
    else:
        save_file({"x": torch.from_numpy(np.ascontiguousarray(array)), "y": torch.zeros(1)}, path)
    return path


NAMES = ["a.npy", "a.npz", "compressed.npz", "a.safetensors"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.int16, np.uint8])
def test_every_format_and_kind_of_number(tmp_path, name, dtype):
    found = open_inputs(write(tmp_path / name, X.astype(dtype)), 6)
    assert (found.rows, found.width) == (7, 6)
    parts = [found.read(rows, slice(2, 4)) for rows in found.batches(3)]
    assert [len(part) for part in parts] == [3, 3, 1]
    assert np.array_equal(torch.cat(parts).float().numpy(), X[:, 2:4])
    assert np.array_equal(found.read(slice(0, 2), slice(0, 6)).float().numpy(), X[:2])  # back again


@pytest.mark.parametrize("name", ["a.npy", "a.npz"])
def test_columns_first_and_another_byte_order(tmp_path, name):
    for array in (np.asfortranarray(X), X.astype(">f4")):
        found = open_inputs(write(tmp_path / name, array), 6)
        assert np.array_equal(found.read(slice(1, 5), slice(3, 6)).numpy(), X[1:5, 3:])


def test_safetensors_in_bfloat16(tmp_path):
    save_file({"x": torch.from_numpy(X).bfloat16()}, tmp_path / "a.safetensors")
    assert torch.equal(
        open_inputs(tmp_path / "a.safetensors", 6).read(slice(0, 7), slice(0, 6)).float(), torch.tensor(X)
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("array", "message"),
    [
        (X[:, :5], r"expected inputs of shape \(rows, 6\), the model's width, got \(7, 5\)"),
        (X[0], r"expected inputs of shape \(rows, 6\), the model's width, got \(6,\)"),
        (X[None], r"got \(1, 7, 6\)"),
        (X[:0], "expected at least one row"),
        (X > 3, "must hold real numbers of at most 64 bits, got"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path, name, array, message):
    with pytest.raises(ValueError, match=message):
        open_inputs(write(tmp_path / name, array), 6)


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_cut_short(tmp_path, name):
    path = write(tmp_path / name, X)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="is not readable as inputs"):
        open_inputs(path, 6)


@pytest.mark.parametrize("name", NAMES)
def test_files_of_something_else(tmp_path, name):
    (tmp_path / name).write_text("once upon a time")
    with pytest.raises(ValueError, match="is not readable as inputs"):
        open_inputs(tmp_path / name, 6)


def test_nothing_is_unpickled(tmp_path):
    objects = np.array([[print] * 6], dtype=object)
    np.save(tmp_path / "a.npy", objects, allow_pickle=True)
    np.savez(tmp_path / "a.npz", x=objects)
    for name in ("a.npy", "a.npz"):
        with pytest.raises(ValueError, match="is not readable as inputs"):
            open_inputs(tmp_path / name, 6)


def test_files_without_x_and_files_that_are_none(tmp_path):
    np.savez(tmp_path / "a.npz", y=X, z=X)
    with pytest.raises(ValueError, match="there is no array 'x' in it, only y, z"):
        open_inputs(tmp_path / "a.npz", 6)
    save_file({"weight": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="there is no tensor 'x' in it, only weight"):
        open_inputs(tmp_path / "a.safetensors", 6)
    (tmp_path / "a.csv").write_text("1,2\n")
    with pytest.raises(ValueError, match=r"must be one of \.npy, \.npz, \.safetensors, got '\.csv'"):
        open_inputs(tmp_path / "a.csv", 6)
    with pytest.raises(ValueError, match="there is no file of inputs"):
        open_inputs(tmp_path / "b.npy", 6)
