"""Which token comes next: the likeliest, or one drawn from the likely ones.

A draw turns one uniform number a row into a token, by the sums of the probabilities in the order of the vocabulary. All
ranks hold the same logits and draw the same numbers, so that they choose alike without an exchange; and as no order
by likelihood is involved, logits that differ by rounding move the borders between tokens by no more than that.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from phantom_parallel.utils.layout import positive

_SEEDS = 1 << 63


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Args:
        temperature: 0 takes the likeliest token; above, logits are divided by it and one is drawn.
        top_k: draw from so many of the likeliest only.
        top_p: draw from the fewest likeliest that have this probability together; after ``top_k``.
        seed: of the draws.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 or a positive number, got {self.temperature!r}")
        if self.top_k is not None:
            positive(top_k=self.top_k)
        if self.top_p is not None and (not _is_number(self.top_p) or not 0 < self.top_p <= 1):
            raise ValueError(f"top_p must lie above 0 and up to 1, got {self.top_p!r}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed < _SEEDS:
            raise ValueError(f"seed must be a whole number from 0 to {_SEEDS - 1}, got {self.seed!r}")
        for name in ("top_k", "top_p"):
            if self.temperature == 0 and getattr(self, name) is not None:
                raise ValueError(
                    f"{name}={getattr(self, name)} narrows what is drawn from, but temperature=0 draws nothing: "
                    "give a temperature above 0"
                )

    def check_vocabulary(self, vocab: int) -> None:
        """Whether ``top_k`` tokens are there."""
        if self.top_k is not None and self.top_k > vocab:
            raise ValueError(f"top_k={self.top_k} is more than the model's vocabulary of {vocab}")


class Sampler:
    """Chooses tokens, one after the other. Two with the same settings choose alike from the same logits."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)  # the CPU's: the same numbers on any device

    def __call__(self, logits: Tensor) -> Tensor:
        """(batch, vocab) -> (batch,)."""
        if self._sampling.temperature == 0:
            return logits.argmax(-1)
        drawn = torch.rand(logits.shape[0], generator=self._generator, dtype=torch.float64)
        return draw(probabilities(logits, self._sampling), drawn.to(logits.device))


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """(batch, vocab) probabilities in float64, 0 for tokens that are not to be drawn. They need not sum to 1."""
    logits = logits.double()
    scaled = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature
    if sampling.top_k is None and sampling.top_p is None:
        return scaled.softmax(-1)
    likeliest, tokens = scaled.topk(sampling.top_k or scaled.shape[-1])
    kept = likeliest.softmax(-1)
    if sampling.top_p is not None:
        before = kept.cumsum(-1) - kept  # of the likelier ones: the first token is always kept
        kept = kept.where(before < sampling.top_p, 0.0)
    return torch.zeros_like(scaled).scatter(-1, tokens, kept)


def draw(probabilities: Tensor, drawn: Tensor) -> Tensor:
    """The token of each row at which the sum of probabilities passes ``drawn``, a number from 0 to below 1."""
    sums = probabilities.cumsum(-1)
    total = sums[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))  # rounding must not lead beyond the last token
    found = torch.searchsorted(sums, torch.minimum(drawn[:, None] * total, below), right=True)
    return found.squeeze(-1)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
