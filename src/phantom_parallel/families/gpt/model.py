"""Decoder-only transformers: RMSNorm before each part, rotary positions, grouped-query attention, SwiGLU, no biases.

The model is written once. What a strategy decides is how the linear maps are cut, and with them the norms, the
embedding and the head: `gpt_parts` makes those.
"""

from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from phantom_parallel.distributed.objects import check_agreement
from phantom_parallel.families.gpt.config import GPTConfig
from phantom_parallel.families.gpt.parts import parts_of
from phantom_parallel.nn.attention import Attention, Cache, rotary_tables
from phantom_parallel.ops import gather_features, vocabulary_cross_entropy
from phantom_parallel.ops.collectives import ranks_of
from phantom_parallel.utils.layout import positive


class SwiGLU(nn.Module):
    """down(silu(gate) up), gate and up side by side in pieces of ``width`` features."""

    def __init__(self, gate_up: nn.Module, down: nn.Module, *, width: int) -> None:
        super().__init__()
        self.gate_up, self.down, self.width = gate_up, down, width

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).unflatten(-1, (-1, 2, self.width)).unbind(-2)
        z: Tensor = self.down((F.silu(gate) * up).flatten(-2))
        return z


class Layer(nn.Module):
    """x + attention of its norm, then x + SwiGLU of its norm; the norms are within the maps that follow them."""

    def __init__(self, attention: Attention, mlp: SwiGLU) -> None:
        super().__init__()
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None = None) -> Tensor:
        x = x + self.attention(x, cos, sin, cache)
        z: Tensor = x + self.mlp(x)
        return z


class GPT(nn.Module):
    """A decoder-only transformer by any of three strategies.

    On a mesh, ``phantom`` holds blocks / ranks blocks of the residual stream, with their heads, on each rank; a layer
    has four exchanges each way, which carry ghosts. ``megatron`` holds the stream whole on every rank and cuts the maps
    with torch's own column and row styles, two all-reduces of the stream a layer each way. ``dense`` runs in one
    process. Tokens are whole on every rank, and so are losses and logits. Weights drawn from the same seed are the same
    on any number of ranks, and the same for ``megatron`` and ``dense``.

    ``recompute`` (also an attribute) keeps only what enters each layer and computes the rest again in backward, its
    exchanges included.

    Example::

        model = GPT(GPTConfig(vocab=256, dim=512, layers=4, heads=8, blocks=4, ghosts=16))
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.mesh, self.recompute = config, mesh, recompute
        config.check_ranks(1 if mesh is None else mesh.size())
        check_agreement("a GPT", asdict(config) | {"dtype": str(dtype or torch.get_default_dtype())}, mesh)
        self.ranks = ranks_of(mesh)
        parts = parts_of(config, mesh, device, dtype)
        to_stream = (2 * config.layers) ** -0.5  # so that what the layers add to the stream does not grow with depth
        self.embedding = parts.embedding()
        self.layers = nn.ModuleList()
        for index in range(config.layers):
            attention = Attention(
                parts.normed(config.dim, (config.heads + 2 * config.kv_heads) * config.head_dim),
                parts.linear(config.dim, config.dim, to_stream),
                layer=index,
                head_dim=config.head_dim,
                group=config.group,
            )
            mlp = SwiGLU(
                parts.normed(config.dim, 2 * config.hidden),
                parts.linear(config.hidden, config.dim, to_stream),
                width=config.hidden // config.hidden_groups,
            )
            self.layers.append(Layer(attention, mlp))
        self.head = parts.head()
        self._tables: tuple[Tensor, Tensor] | None = None
        if not self.embedding.weight.is_meta:
            self._rotary()

    cut_features = False  # tokens in and losses or logits out are whole on every rank

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of the targets over all positions of (batch, t) tokens.

        The same number on every rank of the mesh, and backward from it gives each rank the gradients of its own
        parameters. No rank holds all logits.
        """
        loss: Tensor = self(tokens, targets)
        return loss

    def logits(self, tokens: Tensor, cache: Cache | None = None, *, last: bool = False) -> Tensor:
        """Logits over the whole vocabulary, (batch, t, vocab), or with ``last`` those of the last position, (batch, 1,
        vocab). With a cache, positions go on from where it is, it is filled, and no gradient is kept.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            logits: Tensor = self(tokens, cache=cache, last=last)
            return logits

    def new_cache(self, batch: int, length: int | None = None) -> Cache:
        """An empty cache for ``batch`` rows of up to ``length`` positions, the whole context by default. It holds this
        rank's heads only and stays here.
        """
        config = self.config
        length = config.context if length is None else length
        positive(batch=batch, length=length)
        if length > config.context:
            raise ValueError(f"a cache of {length} positions is longer than the model's context of {config.context}")
        like = self.embedding.weight
        shape = config.layers, batch, config.kv_heads // self.ranks.size, length, config.head_dim
        kept: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
        with torch.no_grad():
            return Cache(torch.zeros(shape, **kept), torch.zeros(shape, **kept), head=self._tied_rows())

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, *, cache: Cache | None = None, last: bool = False
    ) -> Tensor:
        """The loss where targets are given, otherwise logits: what `loss` and `logits` call, through every hook."""
        before = 0 if cache is None else cache.position
        self._check(tokens, targets, before)
        if cache is not None:
            cache.check_room(*tokens.shape)
        cos, sin = (table[before : before + tokens.shape[1]] for table in self._rotary())
        x = self.embedding(tokens)
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, cos, sin, cache)
        rows = self._tied_rows() if cache is None else cache.head
        if cache is not None:
            cache.position += tokens.shape[1]
        logits = self.head(x[:, -1:] if last else x, *(() if rows is None else (rows,)))  # this rank's: V / R of them
        if targets is None:
            return gather_features(logits, self.ranks)
        return vocabulary_cross_entropy(logits, targets, ranks=self.ranks)

    def _tied_rows(self) -> Tensor | None:
        return self.head.tied_rows(self.embedding.weight) if self.config.tie_embeddings else None

    def _rotary(self) -> tuple[Tensor, Tensor]:
        """The tables, made when first asked for and again where the model has moved or changed its dtype."""
        like = self.embedding.weight
        dtype = torch.promote_types(like.dtype, torch.float32)
        tables = self._tables
        if tables is None or tables[0].device != like.device or tables[0].dtype != dtype:
            where: dict[str, Any] = {"device": like.device, "dtype": dtype}
            tables = rotary_tables(self.config.context, self.config.head_dim, self.config.rope_base, **where)
            self._tables = tables
        return tables

    def _check(self, tokens: Tensor, targets: Tensor | None, before: int) -> None:
        if tokens.dim() != 2:
            raise ValueError(f"tokens must be (batch, positions), got shape {tuple(tokens.shape)}")
        if before + tokens.shape[1] > self.config.context:
            raise ValueError(
                f"{before + tokens.shape[1]} positions are more than the model's context of {self.config.context}"
            )
        if targets is not None and targets.shape != tokens.shape:
            raise ValueError(f"targets of shape {tuple(targets.shape)} for tokens of shape {tuple(tokens.shape)}")
        if torch.compiler.is_compiling() or tokens.device.type != "cpu":
            return  # elsewhere a look at the values would wait for the device
        for name, given in (("tokens", tokens), ("targets", targets)):
            if given is not None and given.numel():
                low, high = (int(value) for value in given.aminmax())
                if low < 0 or high >= self.config.vocab:
                    raise ValueError(
                        f"{name} must lie from 0 to {self.config.vocab - 1}, got {low if low < 0 else high}"
                    )
