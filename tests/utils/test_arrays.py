"""Files of arrays: every format and kind of number, and headers that declare what is not there."""

import io
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from phantom_parallel.utils import arrays
from phantom_parallel.utils.arrays import open_array, readable

X = np.arange(7 * 6, dtype=np.float32).reshape(7, 6)
ALL = slice(0, 7), slice(0, 6)


def opened(path):
    with readable(path, "numbers"):
        return open_array(path, "x")


def npy(header: str, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    """A file with this header, as NumPy writes it."""
    text = header.encode() + b"\n"
    return b"\x93NUMPY" + version + struct.pack("<H" if version[0] == 1 else "<I", len(text)) + text + data


def header_of(shape: object, descr: object = "<f8", order: bool = False) -> str:
    return f"{{'descr': {descr!r}, 'fortran_order': {order}, 'shape': {shape}}}"


def zipped(path, member: bytes, kind: int = zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.writestr("x.npy", member)
    return path


@pytest.mark.parametrize("kind", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("order", ["C", "F"])
def test_every_kind_of_number_order_and_byte_order(tmp_path, kind, swapped, order):
    array = np.array(X, dtype=np.dtype(kind).newbyteorder(">" if swapped else "<"), order=order)
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "a.npz", x=array)
    np.savez_compressed(tmp_path / "b.npz", x=array)
    for name in ("a.npy", "a.npz", "b.npz"):
        stored = opened(tmp_path / name)
        assert stored.shape == (7, 6)
        assert np.array_equal(stored.read(slice(2, 5), slice(1, 4)).double(), X[2:5, 1:4])
        assert np.array_equal(stored.read(*ALL).double(), X)  # back to the start


def test_all_chunks_are_all_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "_CHUNK_BYTES", 8 * 6 * 3)
    np.savez(tmp_path / "a.npz", x=X)
    stored = opened(tmp_path / "a.npz")
    assert [(rows.start, rows.stop) for rows in stored.chunks()] == [(0, 3), (3, 6), (6, 7)]
    assert np.array_equal(torch.cat([stored.read(rows, slice(0, 6)) for rows in stored.chunks()]), X)


@pytest.mark.parametrize(
    "array",
    [X.astype(np.longdouble), X.astype(np.complex64), X > 3, X.astype(object), X.astype("U4"), X.astype("M8[s]")],
    ids=lambda array: str(array.dtype),
)
def test_what_holds_no_real_numbers_of_64_bits_is_refused(tmp_path, array):
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    np.savez(tmp_path / "a.npz", x=array)
    for name in ("a.npy", "a.npz"):
        with pytest.raises(ValueError, match=r"must hold real numbers of at most 64 bits, got") as caught:
            opened(tmp_path / name)
        assert str(array.dtype) in str(caught.value)


def test_safetensors_of_no_real_numbers_are_refused(tmp_path):
    for tensor in (torch.zeros(7, 6, dtype=torch.complex64), torch.zeros(7, 6, dtype=torch.bool)):
        save_file({"x": tensor}, tmp_path / "a.safetensors")
        with pytest.raises(ValueError, match="must hold real numbers"):
            opened(tmp_path / "a.safetensors")


HUGE = [(10**12, 6), (1 << 62, 4), (10**400, 6), (1 << 32, 1 << 32), (7, 1 << 63)]


@pytest.mark.parametrize("shape", HUGE, ids=lambda shape: f"{len(str(shape[0]))} digits")
@pytest.mark.parametrize("order", [False, True])
def test_a_huge_declared_shape_is_refused_without_allocating_it(tmp_path, shape, order):
    file = npy(header_of(shape, order=order), bytes(336))
    (tmp_path / "a.npy").write_bytes(file)
    paths = [tmp_path / "a.npy", zipped(tmp_path / "a.npz", file), zipped(tmp_path / "b.npz", file, 8)]
    tracemalloc.start()
    try:
        for path in paths:
            with pytest.raises(ValueError, match=r"cut short: shape .* needs .* bytes, it has 336"):
                opened(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_archive_that_declares_more_than_it_can_hold_is_refused(tmp_path, method):
    """The sizes of an archive's entries are declared as well."""
    path = zipped(tmp_path / "a.npz", npy(header_of((1 << 40, 6)), bytes(336)), method)
    raw = bytearray(path.read_bytes())
    entry = raw.rfind(b"PK\x01\x02")
    struct.pack_into("<I", raw, entry + 24, 0xFFFFFFF0)  # the uncompressed size
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"x declares 4,294,967,280 bytes, which do not fit into"):
        opened(path)


@pytest.mark.parametrize(
    "header",
    [
        header_of((-7, 6)),
        header_of((7, 6), "no such type"),
        header_of("no shape"),
        header_of((7, 6), [("a", "<f8")]),
        "{" * 3000,
        "(" * 9000,
        "{'descr': '<f8'}",
        "x" * 20000,
        "",
    ],
    ids=range(9),
)
@pytest.mark.parametrize("version", [b"\x01\x00", b"\x02\x00", b"\x09\x09"])
def test_damaged_headers_are_errors_of_one_line(tmp_path, header, version):
    file = npy(header, bytes(336), version)
    (tmp_path / "a.npy").write_bytes(file)
    for path in (tmp_path / "a.npy", zipped(tmp_path / "a.npz", file)):
        with pytest.raises(ValueError, match=r"a\.np. is not readable as numbers: ") as caught:
            opened(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("compress", [False, True])
def test_changed_bytes_of_an_archive_are_noticed_when_it_is_read(tmp_path, compress):
    """Every byte of the file in turn: an error of one line, or the right numbers."""
    buffer = io.BytesIO()
    (np.savez_compressed if compress else np.savez)(buffer, x=X)
    path, good = tmp_path / "a.npz", buffer.getvalue()
    for index in range(len(good)):
        path.write_bytes(good[:index] + bytes([good[index] ^ 0xFF]) + good[index + 1 :])
        try:
            with readable(path, "numbers"):
                found, message = open_array(path, "x").read(*ALL), None
        except ValueError as error:
            found, message = None, str(error)
        if message is None:
            assert np.array_equal(found, X), index
        else:
            assert "is not readable as numbers" in message
            assert "\n" not in message


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.safetensors"])
def test_files_cut_at_any_length_are_errors(tmp_path, name):
    path = tmp_path / name
    if name == "a.safetensors":
        save_file({"x": torch.from_numpy(X)}, path)
    else:
        (np.save(path, X) if name == "a.npy" else np.savez(path, x=X))
    good = path.read_bytes()
    for length in range(0, len(good), 7):
        path.write_bytes(good[:length])
        with pytest.raises(ValueError, match="is not readable as numbers"):
            opened(path)


def test_other_methods_of_compression_are_refused(tmp_path):
    buffer = io.BytesIO()
    np.save(buffer, X)
    with pytest.raises(ValueError, match="compressed by a method that NumPy does not write"):
        opened(zipped(tmp_path / "a.npz", buffer.getvalue(), zipfile.ZIP_LZMA))
