"""A small model with the module names of Hugging Face's Llama, and with its way to find heads."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LlamaAttention(nn.Module):
    """As many heads as the projections have: ``view(..., -1, head_dim)``, as transformers does."""

    def __init__(self, dim: int, heads: int, kv_heads: int, head_norms: bool) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.q_proj = nn.Linear(dim, heads * self.head_dim)
        self.k_proj = nn.Linear(dim, kv_heads * self.head_dim)
        self.v_proj = nn.Linear(dim, kv_heads * self.head_dim)
        self.o_proj = nn.Linear(heads * self.head_dim, dim, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim) if head_norms else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim) if head_norms else nn.Identity()

    def forward(self, hidden_states: Tensor) -> Tensor:
        projections = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in projections)
        q, k, v = (t.transpose(1, 2) for t in (self.q_norm(q), self.k_norm(k), v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class LlamaMLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    def __init__(self, dim: int, hidden: int, heads: int, kv_heads: int, head_norms: bool) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(dim, heads, kv_heads, head_norms)
        self.mlp = LlamaMLP(dim, hidden)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(hidden_states=self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """``LlamaForCausalLM``, with the biases of Qwen2, and with ``head_norms`` the norms of Qwen3."""

    def __init__(self, head_norms: bool, vocab: int = 24, dim: int = 32, heads: int = 8, kv_heads: int = 4) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(vocab, dim)
        self.model.layers = nn.ModuleList(LlamaLayer(dim, dim, heads, kv_heads, head_norms) for _ in range(2))
        self.model.norm = nn.RMSNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))


def tokens() -> Tensor:
    return torch.randint(24, (2, 6), generator=torch.Generator().manual_seed(0))
