"""Causal self-attention over the heads of this rank: rotary positions, grouped queries, and a cache that stays here.

Heads come in groups, one of keys and values with g of queries, and the map into them lays out its features by group:

    q_1 ... q_g  k  v  |  q_1 ... q_g  k  v  |  ...

so that wherever they are cut between groups, a rank has all that attention needs, and it exchanges nothing.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Cache:
    """Keys and values of the positions so far, for this rank's heads: (layers, batch, kv heads here, length, head_dim).

    ``position`` counts those that are filled. ``head`` holds the rows of a tied head where these took an exchange to
    get: a cache is for weights that do not change while it is in use.
    """

    keys: Tensor
    values: Tensor
    position: int = 0
    head: Tensor | None = None

    @property
    def length(self) -> int:
        """How many positions there is room for."""
        return self.keys.shape[3]

    def check_room(self, batch: int, more: int) -> None:
        """Whether ``more`` positions of ``batch`` rows fit."""
        if batch != self.keys.shape[1]:
            raise ValueError(f"the cache was made for a batch of {self.keys.shape[1]}, got one of {batch}")
        if self.position + more > self.length:
            raise ValueError(
                f"the cache has room for {self.length} positions and holds {self.position}, got {more} more: "
                "make a longer one with new_cache"
            )

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep these (batch, kv heads, t, head_dim) of a layer; all there are of it. ``position`` is the model's to
        move, after the last layer.
        """
        end = self.position + k.shape[2]
        both = []
        for kept, new in ((self.keys[layer], k), (self.values[layer], v)):
            kept[:, :, self.position : end].copy_(new)
            both.append(kept[:, :, :end])
        return both[0], both[1]


def rotary_tables(
    length: int, head_dim: int, base: float, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0 to ``length`` - 1, (length, 1, 1, head_dim) each, as `rotate` takes them.

    Feature i and i + head_dim/2 are a pair, turned by position / base^(2i / head_dim).
    """
    with torch.inference_mode(False), torch.no_grad():  # usable for training, wherever they are made
        rates = base ** (torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / -head_dim)
        angles = torch.arange(length, device=device, dtype=torch.float64)[:, None, None, None] * rates
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn (batch, t, ..., head_dim) by its positions: (a cos - b sin, b cos + a sin) for the halves a and b."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention between a map into queries, keys and values and one out of the heads."""

    def __init__(self, qkv: nn.Module, out: nn.Module, *, layer: int, head_dim: int, group: int) -> None:
        super().__init__()
        self.qkv, self.out = qkv, out
        self.layer, self.head_dim, self.group = layer, head_dim, group

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None = None) -> Tensor:
        batch, t = x.shape[:2]
        grouped = self.qkv(x).view(batch, t, -1, self.group + 2, self.head_dim)  # (batch, t, kv here, g + 2, head_dim)
        turned = rotate(grouped[..., :-1, :], cos, sin)
        q = turned[..., :-1, :].flatten(2, 3).transpose(1, 2)  # (batch, heads here, t, head_dim)
        k, v = turned[..., -1, :].transpose(1, 2), grouped[..., -1, :].transpose(1, 2)  # (batch, kv here, t, head_dim)
        before, mask = 0, None
        if cache is not None:
            before = cache.position
            k, v = cache.append(self.layer, k, v)
            if before and t > 1:
                mask = torch.ones(t, before + t, dtype=torch.bool, device=x.device).tril(before)
        causal = before == 0 and t > 1
        mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=self.group > 1)
        z: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return z
