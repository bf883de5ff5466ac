"""The same numbers whatever the number of ranks, and files that are not what they should be."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from phantom_parallel.train import TrainConfig
from phantom_parallel.train.data import Batches, open_data

WIDTH = 16


def config(**changes) -> TrainConfig:
    usual = {"width": WIDTH, "depth": 2, "blocks": 4, "ghosts": 2, "teacher_ghosts": 2, "batch": 8, "samples": 300}
    return TrainConfig(**usual | changes)


@pytest.mark.parametrize("teacher", ["planted", "random"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_teachers_data_are_the_same_on_any_number_of_ranks_and_threads(teacher, ranks):
    whole = open_data(config(data=teacher))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        parts = [open_data(config(data=teacher), rank, ranks) for rank in range(ranks)]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.cat([part.x for part in parts], 1), whole.x)
    assert torch.equal(torch.cat([part.y for part in parts], 1), whole.y)
    assert whole.rows == 300


def test_the_seed_decides_the_data():
    first, again, other = (open_data(config(seed=seed)) for seed in (0, 0, 1))
    assert torch.equal(first.y, again.y)
    assert not torch.equal(first.x, other.x)
    assert not torch.equal(open_data(config(data="random")).y, first.y)
    assert torch.equal(open_data(config(data="random")).x, first.x)


def test_opening_data_leaves_the_default_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    open_data(config())
    assert torch.equal(torch.rand(2), expected)


def test_an_epoch_has_every_row_once_and_a_step_finds_its_rows_again():
    batches = Batches(rows=20, batch=8, seed=1)
    steps = [batches.rows_of(step) for step in range(5)]  # 40 rows: two epochs, the third step has rows of both
    drawn = torch.cat(steps)
    assert sorted(drawn[:20].tolist()) == sorted(drawn[20:].tolist()) == list(range(20))
    assert drawn[:20].tolist() != drawn[20:].tolist()
    assert torch.equal(Batches(rows=20, batch=8, seed=1).rows_of(3), steps[3])
    assert not torch.equal(Batches(rows=20, batch=8, seed=2).rows_of(3), steps[3])


def arrays() -> tuple[np.ndarray, np.ndarray]:
    x = np.arange(64 * WIDTH, dtype=np.float32).reshape(64, WIDTH)
    return x, -x


def written(folder: Path, kind: str) -> str:
    x, y = arrays()
    if kind == "npy":
        np.save(folder / "x.npy", x)
        np.save(folder / "y.npy", y)
        return str(folder)
    if kind == "npz":
        np.savez(folder / "data.npz", x=x, y=y)
    else:
        save_file({"x": torch.from_numpy(x), "y": torch.from_numpy(y)}, folder / "data.safetensors")
    return str(folder / f"data.{kind}")


@pytest.mark.parametrize("kind", ["npy", "npz", "safetensors"])
def test_a_users_arrays_are_read_by_features(tmp_path, kind):
    x, y = arrays()
    data = open_data(config(data=written(tmp_path, kind)), rank=1, ranks=2)
    rows = torch.tensor([5, 0, 63])
    own_x, own_y = data.take(rows)
    assert np.array_equal(own_x, x[rows, 8:])
    assert np.array_equal(own_y, y[rows, 8:])
    assert (data.rows, data.training_rows) == (64, 56)


def test_npy_files_are_mapped_and_not_read(tmp_path):
    data = open_data(config(data=written(tmp_path, "npy")))
    assert isinstance(data.x.base, np.memmap) or isinstance(data.x, np.memmap)


@pytest.mark.parametrize("kind", ["npy", "npz", "safetensors"])
def test_a_truncated_file_is_an_error_that_names_it(tmp_path, kind):
    path = Path(written(tmp_path, kind))
    file = path / "y.npy" if path.is_dir() else path
    file.write_bytes(file.read_bytes()[:-300])
    with pytest.raises(ValueError, match="is not readable as data") as caught:
        open_data(config(data=str(path)))
    assert str(path) in str(caught.value)


def test_data_that_are_not_there_or_do_not_fit_are_errors(tmp_path):
    with pytest.raises(ValueError, match=r"there is no data nowhere\.npz: give planted, random, or"):
        open_data(config(data="nowhere.npz"))
    with pytest.raises(ValueError, match=r"shape \(rows, 32\), the model's width, got \(64, 16\)"):
        open_data(config(data=written(tmp_path, "npz"), width=32))
    (tmp_path / "data.csv").write_text("1,2")
    with pytest.raises(ValueError, match=r"expected a folder with x.npy and y.npy, or a file .npz or .safetensors"):
        open_data(config(data=str(tmp_path / "data.csv")))
    np.savez(tmp_path / "z.npz", x=arrays()[0])
    with pytest.raises(ValueError, match="y is not a file in the archive"):
        open_data(config(data=str(tmp_path / "z.npz")))
    np.savez(tmp_path / "o.npz", x=np.full((64, WIDTH), None), y=np.full((64, WIDTH), None))
    with pytest.raises(ValueError, match="allow_pickle"):
        open_data(config(data=str(tmp_path / "o.npz")))
    with pytest.raises(ValueError, match="64 rows are too few for batch=60"):
        open_data(config(data=written(tmp_path, "npz"), batch=60))
