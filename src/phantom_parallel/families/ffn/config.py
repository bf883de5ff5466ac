"""The sizes of an FFN, as options have them."""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["relu", "gelu", "silu", "tanh", "identity"]


class LayerFeatures:
    """The features of each layer of an FFN: ``width`` between layers, and other numbers of them in and out if set."""

    width: int
    depth: int
    in_features: int | None
    out_features: int | None

    def features_of(self, index: int) -> tuple[int, int]:
        """Input and output features of layer ``index``."""
        first, last = index == 0, index == self.depth - 1
        return (
            self.width if self.in_features is None or not first else self.in_features,
            self.width if self.out_features is None or not last else self.out_features,
        )

    @property
    def model_features(self) -> tuple[int, int]:
        """Features of an input row and of an output row."""
        return self.features_of(0)[0], self.features_of(self.depth - 1)[1]

    @property
    def distinct_layers(self) -> tuple[int, ...]:
        """Indices of layers that stand for all: the first, one between and the last."""
        return tuple(sorted({0, min(1, self.depth - 1), self.depth - 1}))


@dataclass(frozen=True, kw_only=True)
class FFNDimensions(LayerFeatures):
    """The sizes of an FFN, apart from how it is parallelised."""

    width: int
    """Features between layers, and of inputs and outputs unless these are set."""
    depth: int
    """Number of layers."""
    activation: Activation = "relu"
    """Activation after every layer but the last."""
    bias: bool = True
    """Whether layers have a bias."""
    in_features: int | None = None
    """Features of an input; by default those of the data's x, or width."""
    out_features: int | None = None
    """Features of an output; by default those of the data's y, or width."""
