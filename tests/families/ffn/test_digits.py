"""Handwritten digits: every rank its features, and classes that a model learns to tell apart."""

import pytest
import torch

from phantom_parallel.distributed.process_group import ParallelContext
from phantom_parallel.families.ffn.config import FFNTrainConfig
from phantom_parallel.families.ffn.data import _load_images, open_data, scores
from phantom_parallel.train import train

sklearn = pytest.importorskip("sklearn.datasets")

CONFIG = FFNTrainConfig.of(
    width=160, depth=2, blocks=4, ghosts=16, data="digits", batch=64, steps=300, lr=0.005, schedule="cosine"
)


def test_images_are_those_that_scikit_learn_returns_and_ranks_have_their_features():
    pixels, labels = sklearn.load_digits(return_X_y=True)
    actual, classes = _load_images("digits")
    assert (actual == pixels).all()
    assert (classes == labels).all()
    whole = open_data(CONFIG)
    parts = [open_data(CONFIG, rank, 8) for rank in range(8)]
    assert torch.equal(torch.cat([part.x for part in parts], 1), whole.x)
    assert torch.equal(torch.cat([part.y for part in parts], 1), whole.y)
    assert whole.x.square().mean() == pytest.approx(1.0, rel=0.2)


def test_a_phantom_model_learns_them_and_the_accuracy_is_that_of_the_whole_model():
    model, summary = train(CONFIG, ParallelContext())
    assert summary.accuracy > 0.93
    data = open_data(CONFIG)
    x, y = data.take(torch.arange(data.training_rows, data.rows))
    means = model(x).view(-1, 16, 10).mean(1)  # 160 features: each class has 16
    assert summary.accuracy == pytest.approx(float((means.argmax(1) == y[:, :10].argmax(1)).double().mean()))


def test_scores_of_ranks_with_fewer_features_than_classes_add_up():
    out = torch.randn(5, 64, dtype=torch.float64)
    actual = sum(scores(out[:, part], part, 64) for part in (slice(first, first + 8) for first in range(0, 64, 8)))
    expected = torch.stack([out[:, digit::10].mean(1) for digit in range(10)], 1)
    assert torch.allclose(actual, expected, rtol=1e-12)
