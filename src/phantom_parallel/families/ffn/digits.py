"""scikit-learn's handwritten digits, 1797 images of 8 x 8, as rows of a model that is equally wide everywhere.

Every feature of an input is a fixed random mixture of all pixels, so that no block lacks the image; feature j of a
target is 1 where the image is of class j mod 10 and else 0. A model's score for a class is the mean over its features.
"""

from importlib import import_module

import torch
from torch import Tensor

from phantom_parallel.families.ffn.train_config import PIXELS
from phantom_parallel.utils.seeds import generator

CLASSES = 10


def digits(width: int, features: slice) -> tuple[Tensor, Tensor]:
    """Inputs and targets of all rows in an order of ours, with these features."""
    try:
        images, labels = import_module("sklearn.datasets").load_digits(return_X_y=True)
    except ImportError:
        raise ValueError(
            "the data digits come with scikit-learn, which is not installed: pip install 'phantom-parallel[digits]'"
        ) from None
    # The file has them writer by writer: in its order, the last ones would be by other people than the rest.
    order = torch.randperm(len(labels), generator=generator(0, 0, purpose=4))
    pixels = torch.from_numpy(images)[order]  # float64, as the product must be: see `teacher`
    pixels = (pixels - pixels.mean()) / pixels.std()
    mixture = torch.randn(PIXELS, width, generator=generator(0, 0, purpose=5), dtype=torch.float64)
    x = pixels @ (mixture / PIXELS**0.5)
    y = torch.from_numpy(labels)[order].unsqueeze(1) == class_of(features)
    return x[:, features].float().contiguous(), y.float()


def class_of(features: slice) -> Tensor:
    """Which class each feature of an output stands for."""
    return torch.arange(features.start, features.stop) % CLASSES


def scores(out: Tensor, features: slice, width: int) -> Tensor:
    """(rows, classes): what these features contribute to the mean of each class over all ``width`` features."""
    speakers = torch.bincount(class_of(slice(0, width)), minlength=CLASSES).to(out)
    sums = out.new_zeros(len(out), CLASSES)
    return sums.index_add_(1, class_of(features).to(out.device), out) / speakers
