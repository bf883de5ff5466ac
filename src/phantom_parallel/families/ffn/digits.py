"""scikit-learn's handwritten digits, 1797 images of 8 x 8 pixels, as data for a model of any width.

Every feature of an input is a fixed random mixture of all pixels, so that every block receives the whole image. Feature
j of a target is 1 if the image is of class j mod 10, otherwise 0. The score of a class is the mean over its features.
"""

from importlib import import_module

import torch
from torch import Tensor

from phantom_parallel.families.ffn.train_config import PIXELS
from phantom_parallel.utils.seeds import generator

CLASSES = 10


def digits(in_features: int, features: tuple[slice, slice]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of all rows, shuffled in a fixed order, each with these features.

    Raises:
        ValueError: If scikit-learn is not installed.
    """
    try:
        images, labels = import_module("sklearn.datasets").load_digits(return_X_y=True)
    except ImportError:
        raise ValueError(
            "the data digits come with scikit-learn, which is not installed: pip install 'phantom-parallel[digits]'"
        ) from None
    # The data set is sorted by writers: without a shuffle, held-out digits would be those of other writers.
    order = torch.randperm(len(labels), generator=generator(0, 0, purpose=4))
    pixels = torch.from_numpy(images)[order]  # float64, as the product must be: see `teacher`
    pixels = (pixels - pixels.mean()) / pixels.std()
    mixture = torch.randn(PIXELS, in_features, generator=generator(0, 0, purpose=5), dtype=torch.float64)
    x = pixels @ (mixture / PIXELS**0.5)
    y = torch.from_numpy(labels)[order].unsqueeze(1) == class_of(features[1])
    return x[:, features[0]].float().contiguous(), y.float()


def class_of(features: slice) -> Tensor:
    """Return the class that each feature of an output belongs to."""
    return torch.arange(features.start, features.stop) % CLASSES


def scores(out: Tensor, features: slice, width: int) -> Tensor:
    """Return (rows, classes): the part of these features in the score of each class, of ``width`` features in all."""
    features_per_class = torch.bincount(class_of(slice(0, width)), minlength=CLASSES).to(out)
    sums = out.new_zeros(len(out), CLASSES)
    return sums.index_add_(1, class_of(features).to(out.device), out) / features_per_class
