"""Causal self-attention over the heads of this rank: rotary position embeddings, grouped queries, and a local cache.

Each head of keys and values is shared by g query heads, and the projection orders its output features by such groups:

    q_1 ... q_g  k  v  |  q_1 ... q_g  k  v  |  ...

so that a rank that holds complete groups computes their attention without any collective.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Cache:
    """Keys and values of past positions, for this rank's heads: (layers, batch, local kv heads, length, head_dim). The
    weights must not change while a cache is in use.
    """

    keys: Tensor
    values: Tensor
    position: int = 0  # number of filled positions
    head: Tensor | None = None  # rows of a tied head, if these need a collective
    starts: Tensor | None = None  # first valid position of each row, (batch,), where rows are padded on the left

    @property
    def length(self) -> int:
        """The maximum number of positions."""
        return self.keys.shape[3]

    def check_room(self, batch: int, more: int) -> None:
        """Raise ValueError if ``more`` positions of ``batch`` rows do not fit."""
        if batch != self.keys.shape[1]:
            raise ValueError(f"the cache has a batch size of {self.keys.shape[1]}, got {batch}")
        if self.position + more > self.length:
            filled = f"{self.length} positions and holds {self.position}"
            raise ValueError(f"the cache has room for {filled}, got {more} more: make a longer one with new_cache")

    def positions(self, t: int) -> Tensor | slice:
        """Index of the next ``t`` positions in tables by position: a slice, or (batch, t) where rows have starts."""
        if self.starts is None:
            return slice(self.position, self.position + t)
        filled = torch.arange(self.position, self.position + t, device=self.starts.device)
        return (filled - self.starts[:, None]).clamp_min(0)

    def mask(self, t: int) -> Tensor | None:
        """Keys that the next ``t`` positions attend to; None for all that are filled, or all up to their own."""
        if self.starts is None and (self.position == 0 or t == 1):
            return None
        keys = torch.arange(self.position + t, device=self.keys.device)
        queries = keys[self.position :, None]
        allowed = keys <= queries
        if self.starts is not None:  # a padded position attends to itself, since softmax needs a key
            allowed = allowed & (keys >= self.starts[:, None, None, None]) | (keys == queries)
        return allowed

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of a layer, and return all. The model advances ``position`` after the last layer."""
        end = self.position + k.shape[2]
        filled = []
        for buffer, new in ((self.keys[layer], k), (self.values[layer], v)):
            buffer[:, :, self.position : end].copy_(new)
            filled.append(buffer[:, :, :end])
        return filled[0], filled[1]


def rotary_tables(
    length: int, rates: Tensor, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, (length, 1, 1, head_dim), of angles position * rates[i] of features i and i + head_dim/2."""
    with torch.inference_mode(False), torch.no_grad():  # usable for training even if made in inference mode
        angles = torch.arange(length, device=device, dtype=torch.float64)[:, None, None, None] * rates.to(device)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (batch, t, ..., head_dim) by its positions: (a cos - b sin, b cos + a sin) for the halves a and b."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention between the projection ``qkv`` to the features of this rank's heads, ordered by groups, and
    the output projection ``out``. ``layer`` is the index of the layer in the cache.
    """

    def __init__(self, qkv: nn.Module, out: nn.Module, *, layer: int, head_dim: int, queries_per_kv: int) -> None:
        super().__init__()
        self.qkv, self.out = qkv, out
        self.layer, self.head_dim, self.queries_per_kv = layer, head_dim, queries_per_kv

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None = None) -> Tensor:
        return self.out(self.mix(self.qkv(x), cos, sin, cache))

    def mix(self, projected: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None = None) -> Tensor:
        """What lies between the two projections: (batch, t, features) each."""
        grouped = projected.unflatten(-1, (-1, self.queries_per_kv + 2, self.head_dim))
        return attend(grouped, cos, sin, cache, self.layer).transpose(1, 2).flatten(2)


def attend(grouped: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None, layer: int) -> Tensor:
    """Causal attention of the queries, key and value of each group, (batch, t, local kv heads, g + 2, head_dim), with
    `rotary_tables` of the positions: (batch, local heads, t, head_dim).
    """
    t, queries_per_kv = grouped.shape[1], grouped.shape[3] - 2
    qk, v = grouped.split((queries_per_kv + 1, 1), 3)  # whose backward is one concatenation, and that of slices a sum
    q, k = rotate(qk, cos, sin).split((queries_per_kv, 1), 3)
    q = q.flatten(2, 3).transpose(1, 2)  # (batch, local heads, t, head_dim)
    k, v = k.squeeze(3).transpose(1, 2), v.squeeze(3).transpose(1, 2)  # (batch, local kv heads, t, head_dim)
    mask = None
    if cache is not None:
        mask = cache.mask(t)
        k, v = cache.append(layer, k, v)
    causal = mask is None and t > 1
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=queries_per_kv > 1)
