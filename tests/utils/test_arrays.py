"""Files of arrays of every format and kind of number, and random streams."""

import itertools

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from phantom_parallel.utils.arrays import derive_seed, generator, open_array, readable

X = np.arange(7 * 6, dtype=np.float32).reshape(7, 6)
ALL = slice(0, 7), slice(0, 6)


def opened(path):
    with readable(path, "numbers"):
        return open_array(path, "x")


@pytest.mark.parametrize("kind", ["i1", "f2", "f8"])
@pytest.mark.parametrize(("swapped", "order"), [(False, "C"), (True, "F")])
def test_every_kind_of_number_order_and_byte_order(tmp_path, kind, swapped, order):
    array = np.array(X, dtype=np.dtype(kind).newbyteorder(">" if swapped else "<"), order=order)
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "a.npz", x=array)
    np.savez_compressed(tmp_path / "b.npz", x=array)
    for name in ("a.npy", "a.npz", "b.npz"):
        stored = opened(tmp_path / name)
        assert stored.shape == (7, 6)
        assert (stored.mapped is not None) == (name == "a.npy")
        assert np.array_equal(stored.read(slice(2, 5), slice(1, 4)).double(), X[2:5, 1:4])
        assert np.array_equal(stored.read(*ALL).double(), X)


def test_a_tensor_of_a_safetensors_file(tmp_path):
    save_file({"x": torch.from_numpy(X).bfloat16(), "y": torch.zeros(1)}, tmp_path / "a.safetensors")
    stored = opened(tmp_path / "a.safetensors")
    assert torch.equal(stored.read(slice(2, 5), slice(1, 4)), torch.from_numpy(X[2:5, 1:4]).bfloat16())


@pytest.mark.parametrize(
    "array",
    [X.astype(np.longdouble), X.astype(np.complex64), X > 3, X.astype(object), X.astype("U4")],
    ids=lambda array: str(array.dtype),
)
def test_what_holds_no_real_numbers_is_refused_and_nothing_is_unpickled(tmp_path, array):
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    np.savez(tmp_path / "a.npz", x=array)
    for name in ("a.npy", "a.npz"):
        with pytest.raises(ValueError, match=name):
            opened(tmp_path / name)
    if array.dtype == bool:
        save_file({"x": torch.from_numpy(array)}, tmp_path / "a.safetensors")
        with pytest.raises(ValueError, match="real numbers"):
            opened(tmp_path / "a.safetensors")


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.safetensors"])
def test_files_that_are_cut_short_or_lack_the_array_are_errors_of_one_line(tmp_path, name):
    path = tmp_path / name
    if name == "a.safetensors":
        save_file({"x": torch.from_numpy(X)}, path)
    else:
        (np.save(path, X) if name == "a.npy" else np.savez(path, x=X))
    good = path.read_bytes()
    if name != "a.npy":
        with pytest.raises(ValueError, match="'y'"), readable(path, "numbers"):
            open_array(path, "y")
    for length in range(0, len(good), 97):
        path.write_bytes(good[:length])
        with pytest.raises(ValueError, match=f"{name} is not readable as numbers") as caught:
            opened(path)
        assert "\n" not in str(caught.value)


def test_a_stream_depends_on_its_seed_piece_and_purpose_only():
    first, again = (torch.rand(4, generator=generator(3, 5, purpose=1)) for _ in range(2))
    assert torch.equal(first, again)
    seeds = {derive_seed(*key, purpose=purpose) for *key, purpose in itertools.product(range(8), repeat=3)}
    assert len(seeds) == 8**3
    assert all(0 <= seed < 1 << 63 for seed in seeds)
