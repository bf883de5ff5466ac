"""The same numbers whatever the number of ranks, and files that are not what they should be."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from phantom_parallel.families.ffn.config import FFNTrainConfig
from phantom_parallel.families.ffn.data import open_data, rows_of_step

WIDTH = 16


def config(**changes) -> FFNTrainConfig:
    usual = {"width": WIDTH, "depth": 2, "blocks": 4, "ghosts": 2, "teacher_ghosts": 2, "batch": 8, "samples": 300}
    return FFNTrainConfig.of(**usual | changes)


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


def test_an_epoch_has_every_row_once_and_a_step_finds_its_rows_again():
    epochs = {"rows": 20, "batch": 8}
    steps = [rows_of_step(step, **epochs, seed=1) for step in range(5)]  # two epochs: the third step has rows of both
    drawn = torch.cat(steps)
    assert sorted(drawn[:20].tolist()) == sorted(drawn[20:].tolist()) == list(range(20))
    assert drawn[:20].tolist() != drawn[20:].tolist()
    assert torch.equal(rows_of_step(3, **epochs, seed=1), steps[3])
    assert not torch.equal(rows_of_step(3, **epochs, seed=2), steps[3])
    assert len(rows_of_step(1, rows=3, batch=8, seed=1)) == 8  # more than two epochs


def arrays() -> tuple[np.ndarray, np.ndarray]:
    x = np.arange(64 * WIDTH, dtype=np.float32).reshape(64, WIDTH)
    return x, -x


def written(folder: Path, kind: str, wrong: tuple = ()) -> str:
    """A file of the arrays, with NaN at the place ``wrong`` of x."""
    x, y = arrays()
    if wrong:
        x[wrong] = np.nan
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
    assert kind != "npy" or isinstance(data.x.base, np.memmap)  # mapped, and not read


def open_on_rank(training: FFNTrainConfig) -> str:
    with pytest.raises(ValueError, match="is not finite") as caught:
        open_data(training, dist.get_rank(), training.ranks, dist.group.WORLD)
    return str(caught.value)


def test_all_ranks_raise_what_one_finds_in_its_features(ranks, tmp_path):
    path = written(tmp_path, "npy", wrong=(60, 9))  # a feature of rank 1
    messages = ranks(2)(open_on_rank, config(data=path, ranks=2))
    assert messages[0] == messages[1]
    assert "row 60 of x (held out)" in messages[0]


def test_data_that_are_not_there_or_do_not_fit_are_errors(tmp_path):
    x, y = arrays()
    np.savez(tmp_path / "rows.npz", x=x, y=y[1:])
    (tmp_path / "data.csv").write_text("1,2")
    good = Path(written(tmp_path, "npz")).name
    for file, changes, message in (
        ("nowhere.npz", {}, r"there is no data .*nowhere\.npz: give darcy, .*mnist, or"),
        (good, {"in_features": 32}, r"x \(rows, 32\) and y \(rows, 16\), the model's features, got \(64, 16\) and"),
        (good, {"batch": 60}, "64 rows are too few for batch=60"),
        ("rows.npz", {}, r"the model's features, got \(64, 16\) and \(63, 16\)"),
        ("data.csv", {}, r"expected a folder with x.npy and y.npy, or a file .npz or .safetensors"),
    ):
        with pytest.raises(ValueError, match=message):
            open_data(config(data=str(tmp_path / file), **changes))
