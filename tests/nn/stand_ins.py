"""Small models with the module names of Hugging Face's Llama, Qwen and BERT, and with their way to find heads."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def attend(q: Tensor, k: Tensor, v: Tensor, head_dim: int, *, causal: bool) -> Tensor:
    """As many heads as the projections have: ``view(..., -1, head_dim)``, as transformers does."""
    q, k, v = (t.unflatten(-1, (-1, head_dim)).transpose(1, 2) for t in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return mixed.transpose(1, 2).flatten(2)


class LlamaAttention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, *, bias: bool, head_norms: bool) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.q_proj = nn.Linear(dim, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, dim, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim) if head_norms else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim) if head_norms else nn.Identity()

    def forward(self, hidden_states: Tensor) -> Tensor:
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        q = self.q_norm(q.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        k = self.k_norm(k.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        return self.o_proj(attend(q, k, v, self.head_dim, causal=True))


class LlamaMLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    def __init__(self, dim: int, hidden: int, heads: int, kv_heads: int, **options: bool) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(dim, heads, kv_heads, **options)
        self.mlp = LlamaMLP(dim, hidden)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(hidden_states=self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """``LlamaForCausalLM``; with ``bias`` Qwen2, with ``head_norms`` Qwen3."""

    def __init__(
        self, vocab: int = 24, dim: int = 32, hidden: int = 48, layers: int = 2, heads: int = 8, kv_heads: int = 4,
        *, bias: bool = False, head_norms: bool = False, tie: bool = False
    ) -> None:  # fmt: skip
        super().__init__()
        sizes = dim, hidden, heads, kv_heads
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(vocab, dim)
        self.model.layers = nn.ModuleList(LlamaLayer(*sizes, bias=bias, head_norms=head_norms) for _ in range(layers))
        self.model.norm = nn.RMSNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        if tie:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))


class BertSelfAttention(nn.Module):
    """Reshapes by ``num_attention_heads`` and ``all_head_size``, as transformers did up to version 4.4x."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.num_attention_heads, self.attention_head_size, self.all_head_size = heads, dim // heads, dim
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        shape = *x.shape[:-1], self.num_attention_heads, self.attention_head_size
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()
        return mixed.view(*x.shape[:-1], self.all_head_size)


class BertResidual(nn.Module):
    def __init__(self, in_features: int, dim: int) -> None:
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(in_features, dim), nn.LayerNorm(dim)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + residual)


class BertLayer(nn.Module):
    def __init__(self, dim: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention, self.intermediate = nn.Module(), nn.Module()
        self.attention.self = BertSelfAttention(dim, heads)
        self.attention.output = BertResidual(dim, dim)
        self.intermediate.dense = nn.Linear(dim, hidden)
        self.output = BertResidual(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention.output(self.attention.self(x), x)
        return self.output(F.gelu(self.intermediate.dense(x)), x)


class Bert(nn.Module):
    """``BertModel``."""

    def __init__(self, vocab: int = 24, dim: int = 32, hidden: int = 48, layers: int = 2, heads: int = 8) -> None:
        super().__init__()
        self.embeddings = nn.Module()
        self.embeddings.word_embeddings = nn.Embedding(vocab, dim)
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(BertLayer(dim, hidden, heads) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embeddings.word_embeddings(tokens)
        for layer in self.encoder.layer:
            x = layer(x)
        return x


def tokens() -> Tensor:
    return torch.randint(24, (2, 6), generator=torch.Generator().manual_seed(0))
