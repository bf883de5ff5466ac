"""Rates of rotary position embeddings, with the scalings that pretrained models have."""

from math import pi

import torch
from torch import Tensor

from phantom_parallel.families.gpt.config import RopeScaling


def rotary_rates(head_dim: int, base: float, scaling: RopeScaling | None = None) -> Tensor:
    """Radians per position of each pair of features, (head_dim / 2,) in float64: base^(-2i / head_dim), scaled."""
    rates = base ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / -head_dim)
    if scaling is None:
        return rates
    slow = rates / scaling.factor
    if scaling.kind == "linear":
        return slow
    low, high, context = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_context
    assert low is not None
    assert high is not None
    assert context is not None
    # 1 where more than ``high`` turns fit into the original context, 0 for fewer than ``low``, and linear in between.
    turns = context * rates / (2 * pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * rates + (1 - kept) * slow
