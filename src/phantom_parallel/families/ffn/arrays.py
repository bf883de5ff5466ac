"""A user's arrays of inputs x and targets y."""

from pathlib import Path

from phantom_parallel.utils.arrays import StoredArray, open_array


def open_arrays(path: Path) -> tuple[StoredArray, StoredArray]:
    """Open x and y of a folder with x.npy and y.npy, which are memory-mapped, or of a file .npz or .safetensors.

    Raises:
        ValueError: If there are no such arrays. Damaged files cause other errors as well: use `readable` around this.
    """
    if path.is_dir():
        return open_array(path / "x.npy", "x"), open_array(path / "y.npy", "y")
    if path.suffix not in (".npz", ".safetensors"):
        raise ValueError("expected a folder with x.npy and y.npy, or a file .npz or .safetensors")
    return open_array(path, "x"), open_array(path, "y")
