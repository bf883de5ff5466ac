"""Layers with attention and SwiGLU in parallel: x + attention(norm(x)) + SwiGLU(norm(x)), with half of the exchanges.

One map gives queries, keys, values, gate and up from one norm, and one map takes what attention and SwiGLU give back to
the stream. Features are ordered by heads of keys and values, each with its queries and its piece of the hidden width:

    q_1 ... q_g  k  v  gate  up  |  q_1 ... q_g  k  v  gate  up  |  ...        and back:  heads  hidden  |  ...
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phantom_parallel.families.gpt.turns import Part, apply_map
from phantom_parallel.nn.attention import Cache, attend


class HeadAttention(nn.Module):
    """Attention of projected heads: a module, so that counts and profiles show it by itself."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, grouped: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None = None) -> Tensor:
        return attend(grouped, cos, sin, cache, self.layer)


class ParallelLayer(nn.Module):
    """A layer whose attention and SwiGLU read the same norm and are added to the stream together.

    Args:
        qkv_gate_up: Norm and projection to the features of this rank's pieces.
        out_down: Projection from what they give back to the stream.
        layer: Index of the layer in the cache.
        head_dim: Features of a head.
        queries_per_kv: Query heads that share one head of keys and values.
        width: Hidden features of the SwiGLU in each piece.
    """

    def __init__(
        self, qkv_gate_up: nn.Module, out_down: nn.Module, *, layer: int, head_dim: int, queries_per_kv: int, width: int
    ) -> None:
        super().__init__()
        self.qkv_gate_up, self.out_down = qkv_gate_up, out_down
        self.attention = HeadAttention(layer)
        self.head_dim, self.queries_per_kv = head_dim, queries_per_kv
        self.attention_width = (queries_per_kv + 2) * head_dim
        self.piece = self.attention_width + 2 * width

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None = None) -> Tensor:
        z: Tensor = x + self.out_down(self._mix(self.qkv_gate_up(x), cos, sin, cache))
        return z

    def in_turns(self, x: Tensor, cos: Tensor, sin: Tensor) -> Part:
        """The same with turns for other parts of the batch."""
        projected = yield from apply_map(self.qkv_gate_up, x)
        z = yield from apply_map(self.out_down, self._mix(projected, cos, sin, None))
        return x + z

    def _mix(self, projected: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None) -> Tensor:
        each = projected.unflatten(-1, (-1, self.piece))  # (batch, t, local kv heads, features)
        grouped = each[..., : self.attention_width].unflatten(-1, (-1, self.head_dim))
        gate, up = each[..., self.attention_width :].chunk(2, -1)
        mixed = self.attention(grouped, cos, sin, cache).transpose(1, 2)  # (batch, t, local heads, head_dim)
        heads = mixed.unflatten(2, (-1, self.queries_per_kv)).flatten(3)
        return torch.cat([heads, F.silu(gate) * up], -1).flatten(2)
