"""The sizes of an FFN, as options have them."""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["relu", "gelu", "silu", "tanh", "identity"]


@dataclass(frozen=True, kw_only=True)
class FFNDimensions:
    """The sizes of an FFN, apart from how it is parallelised."""

    width: int
    """Features of every layer."""
    depth: int
    """Number of layers."""
    activation: Activation = "relu"
    """Activation after every layer but the last."""
    bias: bool = True
    """Whether layers have a bias."""
