"""The same numbers whatever the number of ranks, and files that are not what they should be."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from phantom_parallel import FFN
from phantom_parallel.distributed.process_group import ParallelContext
from phantom_parallel.families.ffn.config import FFNTrainConfig
from phantom_parallel.families.ffn.data import Batches, _cache, check_data, open_data

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


def shared(training: FFNTrainConfig, cut: bool) -> tuple:
    """On every rank of the pool: its part, and the number of rows that its teacher evaluated."""
    evaluated, forward = [], FFN.forward

    def counted(self, x):
        evaluated.append(len(x))
        return forward(self, x)

    _cache.clear()
    parallel = ParallelContext.create(training.ranks, training.dp, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FFN, "forward", counted)
        data = open_data(training, *((parallel.tp_rank, training.ranks) if cut else (0, 1)), parallel)
        again = open_data(training, *((parallel.tp_rank, training.ranks) if cut else (0, 1)), parallel)
    assert again.y is data.y
    return parallel.tp_rank, data.x, data.y, sum(evaluated)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("teacher", ["planted", "random"])
@pytest.mark.parametrize(("count", "copies"), [(2, 1), (2, 2), (4, 1)])
def test_ranks_share_a_teachers_work_and_get_the_same_data(ranks, teacher, count, copies):
    training = config(data=teacher, samples=1100, ranks=count, dp=copies)  # 5 chunks: the last round is not full
    whole = open_data(config(data=teacher, samples=1100))
    share = WIDTH // count
    total = 0
    for tp_rank, x, y, evaluated in ranks(count * copies)(shared, training, True):
        own = slice(tp_rank * share, (tp_rank + 1) * share)
        assert torch.equal(x, whole.x[:, own])
        assert torch.equal(y, whole.y[:, own])
        total += evaluated
    assert total == 5 * 256  # each chunk once in all
    for _, x, y, _ in ranks(count * copies)(shared, training, False):  # megatron holds whole features
        assert torch.equal(x, whole.x)
        assert torch.equal(y, whole.y)


def test_the_last_two_data_sets_of_a_teacher_are_kept():
    _cache.clear()
    first, second = open_data(config()), open_data(config(seed=1))
    assert open_data(config(lr=0.5, depth=3)).y is first.y  # trained otherwise, on the same data
    third = open_data(config(seed=2))  # the one that was not used for longest goes
    assert open_data(config()).y is first.y
    assert open_data(config(seed=2)).y is third.y
    again = open_data(config(seed=1))
    assert again.y is not second.y
    assert torch.equal(again.y, second.y)


def lacking_on_rank_1(training: FFNTrainConfig) -> torch.Tensor:
    """Rank 0 has the data already, rank 1 has not: nobody waits for ever."""
    parallel = ParallelContext.create(training.ranks, training.dp, torch.device("cpu"))
    open_data(training, parallel.tp_rank, 2, parallel)
    if parallel.rank == 1:
        _cache.clear()
    return open_data(training, parallel.tp_rank, 2, parallel).y


def test_ranks_of_which_one_lacks_the_data_make_them_together(ranks):
    actual = ranks(2)(lacking_on_rank_1, config(ranks=2))
    assert torch.equal(torch.cat(actual, 1), open_data(config()).y)


def test_the_seed_decides_the_data_and_not_the_default_generator():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first, again, other = (open_data(config(seed=seed)) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(first.y, again.y)
    assert not torch.equal(first.x, other.x)
    assert not torch.equal(open_data(config(data="random")).y, first.y)
    assert torch.equal(open_data(config(data="random")).x, first.x)


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


def written(folder: Path, kind: str, dtype: type = np.float32, **values: dict) -> str:
    """A file of the arrays, with ``values`` at some places of x and y."""
    x, y = (array.astype(dtype) for array in arrays())
    for name, places in values.items():
        for place, value in places.items():
            {"x": x, "y": y}[name][place] = value
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


@pytest.mark.parametrize("kind", ["npy", "npz", "safetensors"])
def test_a_truncated_file_is_an_error_that_names_it(tmp_path, kind):
    path = Path(written(tmp_path, kind))
    file = path / "y.npy" if path.is_dir() else path
    file.write_bytes(file.read_bytes()[:-300])
    with pytest.raises(ValueError, match="is not readable as data") as caught:
        open_data(config(data=str(path)))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("kind", ["npy", "npz", "safetensors"])
def test_arrays_of_other_numbers_are_errors_of_one_line(tmp_path, kind):
    path = written(tmp_path, kind, np.bool_ if kind == "safetensors" else np.longdouble)
    with pytest.raises(ValueError, match="must hold real numbers of at most 64 bits, got") as caught:
        open_data(config(data=path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("kind", "bad"), [("npy", np.nan), ("npz", -np.inf), ("safetensors", 1e300)])
def test_a_held_out_row_that_is_not_finite_is_named(tmp_path, kind, bad):
    path = written(tmp_path, kind, np.float64, x={(60, 9): bad})
    with pytest.raises(
        ValueError, match=r"row 60 of x \(held out\), counted from 0, is not finite in float32"
    ) as caught:
        check_data(config(data=path))
    assert path in str(caught.value)
    path = written(tmp_path, kind, np.float64, y={(63, 0): bad, (61, 15): bad})
    with pytest.raises(ValueError, match=r"row 61 of y \(held out\)"):
        open_data(config(data=path))


def test_rows_to_train_on_are_checked_only_when_that_is_requested(tmp_path):
    data = open_data(config(data=written(tmp_path, "npy", x={(17, 3): np.nan})))
    data.check_finite(torch.tensor([3, 16, 18]))
    with pytest.raises(ValueError, match=r": row 17 of x, counted from 0, is not finite"):
        data.check_finite(torch.tensor([3, 17]))


def open_on_rank(training: FFNTrainConfig) -> str:
    parallel = ParallelContext.create(training.ranks, training.dp, torch.device("cpu"))
    with pytest.raises(ValueError, match="is not finite") as caught:
        open_data(training, parallel.tp_rank, training.ranks, parallel)
    return str(caught.value)


def test_all_ranks_raise_what_one_finds_in_its_features(ranks, tmp_path):
    path = written(tmp_path, "npy", x={(60, 9): np.nan})  # a feature of rank 1
    messages = ranks(2)(open_on_rank, config(data=path, ranks=2))
    assert messages[0] == messages[1]
    assert "row 60 of x (held out)" in messages[0]


def test_data_that_are_not_there_or_do_not_fit_are_errors(tmp_path):
    with pytest.raises(ValueError, match=r"there is no data nowhere\.npz: give darcy, .*mnist, or"):
        open_data(config(data="nowhere.npz"))
    with pytest.raises(
        ValueError, match=r"x \(rows, 32\) and y \(rows, 16\), the model's features, got \(64, 16\) and"
    ):
        open_data(config(data=written(tmp_path, "npz"), in_features=32))
    np.savez(tmp_path / "rows.npz", x=arrays()[0], y=arrays()[1][1:])
    with pytest.raises(ValueError, match=r"the model's features, got \(64, 16\) and \(63, 16\)"):
        open_data(config(data=str(tmp_path / "rows.npz")))
    (tmp_path / "data.csv").write_text("1,2")
    with pytest.raises(ValueError, match=r"expected a folder with x.npy and y.npy, or a file .npz or .safetensors"):
        open_data(config(data=str(tmp_path / "data.csv")))
    np.savez(tmp_path / "z.npz", x=arrays()[0])
    with pytest.raises(ValueError, match="there is no array 'y' in it, only x"):
        open_data(config(data=str(tmp_path / "z.npz")))
    np.savez(tmp_path / "o.npz", x=np.full((64, WIDTH), None), y=np.full((64, WIDTH), None))
    with pytest.raises(ValueError, match=r"o\.npz is not readable as data"):
        open_data(config(data=str(tmp_path / "o.npz")))
    with pytest.raises(ValueError, match="64 rows are too few for batch=60"):
        open_data(config(data=written(tmp_path, "npz"), batch=60))
