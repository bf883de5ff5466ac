"""Decoder-only transformers: RMSNorm before each part, rotary positions, grouped-query attention, SwiGLU.

The model is written once. The strategy determines how the linear layers are sharded, and with them the norms, the
embedding and the head: `_ShardedStreamParts` and `_ReplicatedStreamParts` make those.
"""

import warnings
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from math import pi
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils.checkpoint import checkpoint

from phantom_parallel.distributed.data_parallel import shard_fully
from phantom_parallel.distributed.objects import check_agreement
from phantom_parallel.distributed.pipeline import relay
from phantom_parallel.families.gpt.config import GPTConfig, RopeScaling, check_interleave
from phantom_parallel.nn import FeatureEmbedding, NormedPhantomLinear, PhantomLinear, VocabularyHead
from phantom_parallel.nn.attention import Attention, Cache, attend, rotary_tables
from phantom_parallel.nn.init import draw_seed, init_rows
from phantom_parallel.nn.linear import LowRankLinear, NormedLinear, NormedLowRankLinear, rms_norm
from phantom_parallel.nn.megatron import column_style, row_style
from phantom_parallel.nn.sharded import broadcast_seed, to_local
from phantom_parallel.ops import SINGLE_RANK, RankGroup, gather_features, row_cross_entropy, vocabulary_cross_entropy
from phantom_parallel.ops.collectives import STAGES, block_group, flat_mesh, rank_group, stage_meshes
from phantom_parallel.ops.head import PrefetchedWeight
from phantom_parallel.ops.tensor import column_linear
from phantom_parallel.utils.layout import positive, stage_layers
from phantom_parallel.utils.strategies import WireFormat, get_strategy

# A part of a batch: it yields wherever an exchange has begun whose result it needs next. Meanwhile, the other parts
# compute up to the same place. Gradients follow in the opposite order, by autograd's own rule: of what is ready, it
# runs the backward of what ran last.
Part = Generator[None, None, Tensor]
# A part of a layer: the input projection, what is computed of its result, and the output projection.
Sublayer = tuple[nn.Module, Callable[..., Tensor], nn.Module]


def interleave_microbatches(parts: list[Part]) -> list[Tensor]:
    """Run parts with equally many exchanges to their ends, each up to its next one in turn; return their results."""
    results: list[Tensor] = []
    while len(results) < len(parts):
        for part in parts:
            try:
                next(part)
            except StopIteration as finished:
                results.append(finished.value)
    return results


def _begin(module: Any, x: Tensor, split: bool = True) -> Callable[[], Tensor]:
    """Run a linear layer up to its exchange, and return what ends it. torch's own styles start their exchanges by
    themselves, and wait for them where a result is first used.
    """
    begun = module.begin(x) if split and hasattr(module, "begin") else module(x)
    return lambda: begun if isinstance(begun, Tensor) else module.end(begun)


class SwiGLU(nn.Module):
    """down(silu(gate) up), with gate and up in alternating pieces of ``width`` features."""

    def __init__(self, gate_up: nn.Module, down: nn.Module, *, width: int) -> None:
        super().__init__()
        self.gate_up, self.down, self.width = gate_up, down, width

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gated(self.gate_up(x)))

    def gated(self, projected: Tensor, *_: object) -> Tensor:
        """What lies between the two linear layers."""
        gate, up = projected.unflatten(-1, (-1, 2, self.width)).unbind(-2)
        return (F.silu(gate) * up).flatten(-2)


class Layer(nn.Module):
    """x + attention(norm(x)), then x + SwiGLU(norm(x)); the norms are part of the linear layers after them."""

    def __init__(self, attention: Attention, mlp: SwiGLU) -> None:
        super().__init__()
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None = None) -> Tensor:
        x = x + self.attention(x, cos, sin, cache)
        return x + self.mlp(x)

    @property
    def sublayers(self) -> tuple[Sublayer, ...]:
        attention, mlp = self.attention, self.mlp
        return (attention.qkv, attention.mix, attention.out), (mlp.gate_up, mlp.gated, mlp.down)

    def compile_parts(self) -> None:
        """Compile what is computed between two exchanges."""
        self.attention.mix = torch.compile(self.attention.mix)  # type: ignore[method-assign]
        self.mlp.gated = torch.compile(self.mlp.gated)  # type: ignore[method-assign]


class HeadAttention(nn.Module):
    """Attention of projected heads: a module, so that counts and profiles show it by itself."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, grouped: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None = None) -> Tensor:
        return attend(grouped, cos, sin, cache, self.layer)


class ParallelLayer(nn.Module):
    """A layer whose attention and SwiGLU read the same norm: x + attention(norm(x)) + SwiGLU(norm(x)).

    One linear layer gives queries, keys, values, gate and up, and one takes what attention and SwiGLU give back to the
    stream, with half of the exchanges. Features are ordered by heads of keys and values, each with its queries and its
    piece of the hidden width:

        q_1 ... q_g  k  v  gate  up  |  q_1 ... q_g  k  v  gate  up  |  ...        and back:  heads  hidden  |  ...
    """

    def __init__(
        self, qkv_gate_up: nn.Module, out_down: nn.Module, *, layer: int, head_dim: int, queries_per_kv: int, width: int
    ) -> None:
        super().__init__()
        self.qkv_gate_up, self.out_down = qkv_gate_up, out_down
        self.attention = HeadAttention(layer)
        self.head_dim, self.queries_per_kv = head_dim, queries_per_kv
        self.attention_width, self.width = (queries_per_kv + 2) * head_dim, width
        self.piece = self.attention_width + 2 * width

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None = None) -> Tensor:
        return x + self.out_down(self._mix(self.qkv_gate_up(x), cos, sin, cache))

    @property
    def sublayers(self) -> tuple[Sublayer, ...]:
        return ((self.qkv_gate_up, self._mix, self.out_down),)

    def compile_parts(self) -> None:
        """Compile what is computed between two exchanges."""
        self._mix = torch.compile(self._mix)  # type: ignore[method-assign]

    def _mix(self, projected: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None = None) -> Tensor:
        each = projected.unflatten(-1, (-1, self.piece))  # (batch, t, local kv heads, features)
        heads, gate, up = each.split((self.attention_width, self.width, self.width), -1)
        grouped = heads.unflatten(-1, (-1, self.head_dim))
        mixed = self.attention(grouped, cos, sin, cache).transpose(1, 2)  # (batch, t, local heads, head_dim)
        heads = mixed.unflatten(2, (-1, self.queries_per_kv)).flatten(3)
        return torch.cat([heads, F.silu(gate) * up], -1).flatten(2)


def rotary_rates(head_dim: int, base: float, scaling: RopeScaling | None = None) -> Tensor:
    """Radians per position of each pair of features, (head_dim / 2,) in float64: base^(-2i / head_dim), scaled."""
    rates = base ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / -head_dim)
    if scaling is None:
        return rates
    slow = rates / scaling.factor
    if scaling.kind == "linear":
        return slow
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # 1 where more than ``high`` turns fit into the original context, 0 for fewer than ``low``, and linear in between.
    turns = scaling.original_context * rates / (2 * pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return share * rates + (1 - share) * slow


class ReplicatedStreamHead(NormedLinear):
    """The head of a replicated residual stream. A tied head takes the embedding's weight, which torch's styles have
    sharded by rows as they would shard the head's own.
    """

    def __init__(self, norm: nn.Parameter, linear: nn.Module, eps: float, group: RankGroup) -> None:
        super().__init__(norm, linear, eps)
        self.group = group

    def tied_rows(self, weight: Tensor) -> Tensor:
        return weight

    def send_weight(self, rows: int, tied: Tensor | None = None, parts: int = 1) -> None:
        """Nothing: ranks that have the whole stream compute the logits of their part of the vocabulary without it."""

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        if rows is None:
            return super().forward(x)
        x = rms_norm(x, self.norm, self.eps)
        if not isinstance(rows, DTensor):
            return F.linear(x, rows)
        if self.group.wire != "full":
            return column_linear(x, to_local(rows), group=self.group)
        replicated = DTensor.from_local(x, rows.device_mesh, [Replicate()], run_check=False)
        logits = F.linear(replicated, rows)
        assert isinstance(logits, DTensor)
        return logits.to_local(grad_placements=[Shard(x.dim() - 1)])


@dataclass
class _Parts:
    """Makes the parts of a model. The calls must follow the order of the model, since each draws a seed. Where ``held``
    is False, parts may be on the meta device, after the same draws.
    """

    config: GPTConfig
    mesh: DeviceMesh | None
    device: Any
    dtype: torch.dtype | None
    wire: WireFormat
    ranks: DeviceMesh | None  # all that share the model
    held: bool = True


class _ShardedStreamParts(_Parts):
    """Of a model whose features are sharded."""

    def embedding(self, std: float) -> nn.Module:
        blocks = self.config.blocks or self.config.kv_heads  # which ranks divide
        return self._made(FeatureEmbedding, self.config.vocab, self.config.dim, std=std, blocks=blocks)

    def normed(self, sizes: tuple[int, int], ghosts: int | None, *, bias: bool = False) -> nn.Module:
        kind = NormedLowRankLinear if self.config.low_rank else NormedPhantomLinear
        return self._made(kind, *sizes, bias, eps=self.config.norm_eps, **self._cut(ghosts))

    def linear(self, sizes: tuple[int, int], ghosts: int | None, gain: float) -> nn.Module:
        kind = LowRankLinear if self.config.low_rank else PhantomLinear
        return self._made(kind, *sizes, False, gain=gain, **self._cut(ghosts))

    def _cut(self, ghosts: int | None) -> dict[str, Any]:
        rank, blocks = self.config.low_rank, self.config.blocks
        return {"wire": self.wire} | ({"low_rank": rank} if rank else {"blocks": blocks, "ghosts": ghosts})

    def head(self) -> nn.Module:
        config = self.config
        kwargs = {"tie_embeddings": config.tie_embeddings, "eps": config.norm_eps, "wire": self.wire}
        if config.tie_embeddings and not self.held:
            return nn.Identity()
        return self._made(VocabularyHead, config.vocab, config.dim, blocks=config.blocks, **kwargs)

    def _made(self, kind: type[nn.Module], *arguments: Any, **settings: Any) -> nn.Module:
        if self.held:
            return kind(*arguments, mesh=self.mesh, device=self.device, dtype=self.dtype, **settings)
        if not torch.empty(0, device=self.device).is_meta:
            draw_seed()
        return nn.Identity()


@dataclass
class _ReplicatedStreamParts(_Parts):
    """Of strategies that have the whole stream; ``megatron`` applies torch's styles to the same modules."""

    def __post_init__(self) -> None:
        self.mesh = flat_mesh(self.mesh) if self.config.strategy == "megatron" else None
        self.device = torch.device(self.device or torch.get_default_device())

    def embedding(self, std: float) -> nn.Module:
        made = nn.Embedding(self.config.vocab, self.config.dim, device="meta", dtype=self.dtype)
        return self._parallelize(made, row_style(self.wire, embedding=True), gain=std * self.config.dim**0.5)

    def normed(self, sizes: tuple[int, int], ghosts: int | None, *, bias: bool = False) -> nn.Module:
        linear = nn.Linear(*sizes, bias=bias, device="meta", dtype=self.dtype)
        style = column_style(self.wire, in_parts=self.config.ladder)
        return NormedLinear(self._norm(), self._parallelize(linear, style), self.config.norm_eps)

    def linear(self, sizes: tuple[int, int], ghosts: int | None, gain: float) -> nn.Module:
        linear = nn.Linear(*sizes, bias=False, device="meta", dtype=self.dtype)
        return self._parallelize(linear, row_style(self.wire, in_parts=self.config.ladder), gain)

    def head(self) -> nn.Module:
        config, linear = self.config, nn.Identity()
        if not config.tie_embeddings:
            linear = nn.Linear(config.dim, config.vocab, bias=False, device="meta", dtype=self.dtype)  # type: ignore[assignment]
            self._parallelize(linear, column_style(self.wire))
        return ReplicatedStreamHead(self._norm(), linear, config.norm_eps, rank_group(self.mesh, self.wire))

    def _norm(self) -> nn.Parameter:
        weight = torch.ones(self.config.dim, device=self.device if self.held else "meta", dtype=self.dtype)
        if self.mesh is None:
            return nn.Parameter(weight)
        return nn.Parameter(DTensor.from_local(weight, self.mesh, [Replicate()], run_check=False))

    def _parallelize(self, module: Any, style: ParallelStyle, gain: float = 1.0) -> nn.Module:
        """Initialize the full weight, the same on every rank, and apply the style to the module."""
        if self.device.type != "meta":
            seed = broadcast_seed(None, self.ranks)
            if self.held:
                weight, bias = module.to_empty(device=self.device).weight, getattr(module, "bias", None)
                init_rows(weight, bias, out_features=weight.shape[0], rank=0, ranks=1, seed=seed, gain=gain)
        if self.mesh is not None:
            parallelize_module(module, self.mesh, style, src_data_rank=None)
        return cast(nn.Module, module)


def _or_identity(module: Any, held: bool) -> Any:
    """The module, or nothing in its place where this rank does not hold it."""
    return module if held else nn.Identity()


class GPT(nn.Module):
    """A decoder-only transformer with one of several strategies.

    On a mesh, ``phantom`` holds blocks / ranks blocks of the residual stream, with their heads, on each rank; a layer
    has four collectives forward and four backward, which carry ghosts. ``megatron`` replicates the stream and shards
    the linear layers with torch's own column and row styles, with two all-reduces of the stream per layer each way.
    ``lowrank`` shards the stream as phantom does, and its four collectives sum the values between two thin matrices.
    With ``parallel_block``, a layer has half as many; with ``ladder``, they overlap with the next sublayer.
    Tokens, losses and logits are replicated.

    ``fsdp`` shards the weights of the dense model by torch's ``fully_shard``, and each rank works on sequences of its
    own. ``pipeline`` has some consecutive layers on each rank, the embedding on the first and the head on the last; the
    forward pass is that of this rank's stage, what it does not hold is ``nn.Identity``, and both ends hold a weight
    that embedding and head share. On a mesh with the dimensions ``("pp", "tp")``, ``phantom``, ``megatron`` and
    ``dense`` have such stages, with the ranks of "tp" in each; every rank must have torch's same seed. The same seed
    gives the same weights on any number of ranks, and the same for all strategies but
    ``phantom`` and ``lowrank``.

    Args:
        config: The architecture.
        mesh: One-dimensional device mesh to shard the model over, or one with the dimensions ``("pp", "tp")``.
        device: Of the parameters; on the meta device call ``reset_parameters`` of the layers after ``to_empty``.
        dtype: Of the parameters.
        wire: Format in which features and their gradients are sent between ranks, as for `PhantomLinear`.
        activation_checkpointing: Save only the inputs of the layers and recompute the rest in backward.
        reshard_after_forward: For ``fsdp``, whether to free the gathered weights of a layer after its forward pass.
        interleave: Parts of a batch that are interleaved in a loss, so that exchanges of one overlap with products of
            the others. A batch that it does not divide is one part, as is that of a model that is compiled as a whole.

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
        wire: WireFormat = "full",
        activation_checkpointing: bool = False,
        reshard_after_forward: bool = True,
        interleave: int = 1,
    ) -> None:
        super().__init__()
        self.config, self.wire, strategy = config, wire, get_strategy(config.strategy)
        self.activation_checkpointing, self.interleave = activation_checkpointing, interleave
        staged = mesh is not None and mesh.mesh_dim_names == STAGES
        self.mesh = mesh._flatten() if mesh is not None and staged else flat_mesh(mesh)  # all that share the model
        self.stages, mesh = stage_meshes(mesh, strategy.splits_depth)
        settings: dict[str, Any] = {"seed": torch.initial_seed()} if staged else {}  # stages do not exchange seeds
        settings |= {"wire": wire, "interleave": interleave, "activation_checkpointing": activation_checkpointing}
        settings |= asdict(config) | {"dtype": str(dtype or torch.get_default_dtype())}
        check_agreement("a GPT", settings, self.mesh)  # before what only one rank may refuse
        ranks, stages = rank_group(mesh, wire), rank_group(self.stages)
        config.check_ranks(stages.size if strategy.splits_depth else ranks.size)
        config.check_stages(stages.size if staged else 1, interleave)
        strategy.check_wire(wire)
        check_interleave(interleave, config, ranks.size, activation_checkpointing)
        self.group: RankGroup = ranks if strategy.splits_layers else SINGLE_RANK  # which share the work of a layer
        if config.blocks is not None:
            self.group = block_group(mesh, config.blocks, wire)
        self.stage = stage_layers(config.layers, stages.size, stages.rank)
        make_parts = _ShardedStreamParts if strategy.shards_features else _ReplicatedStreamParts
        device = device or (None if self.mesh is None else self.mesh.device_type)
        parts: Any = make_parts(config, mesh, device, dtype, wire, self.mesh)
        to_stream = (2 * config.layers) ** -0.5  # a gain, so that what the layers add does not grow with depth
        parts.held = self.is_first_stage or (config.tie_embeddings and self.is_last_stage)
        std = config.dim**-0.5 if config.tie_embeddings else 1.0  # a shared weight must not lead to large logits
        self.embedding = _or_identity(parts.embedding(std), parts.held)
        self.layers, queries_per_kv = nn.ModuleList(), config.queries_per_kv
        for index, (qkv, out, gate_up, down) in enumerate(config.ghosts_of_layers):
            parts.held, sizes = index in self.stage, config.linear_features
            heads = {"layer": index - self.stage.start, "head_dim": config.head_dim, "queries_per_kv": queries_per_kv}
            layer: nn.Module
            if config.parallel_block:
                into, back = parts.normed(sizes[0], qkv), parts.linear(sizes[1], out, 2**0.5 * to_stream)
                layer = ParallelLayer(into, back, **heads, width=config.hidden // config.kv_heads)
            else:
                into, back = parts.normed(sizes[0], qkv, bias=config.qkv_bias), parts.linear(sizes[1], out, to_stream)
                attention = Attention(into, back, **heads)
                into, back = parts.normed(sizes[2], gate_up), parts.linear(sizes[3], down, to_stream)
                layer = Layer(attention, SwiGLU(into, back, width=config.hidden // config.hidden_groups))
            self.layers.append(_or_identity(layer, parts.held))
        parts.held = self.is_last_stage
        self.head = _or_identity(parts.head(), parts.held)
        self._tables: tuple[Tensor, Tensor] | None = None
        if not self._like.is_meta:
            self._rotary()
        if strategy.shards_rows and mesh is not None:
            shard_fully(self, self.layers, mesh, reshard_after_forward=reshard_after_forward)

    shards_features = False  # tokens, losses and logits are replicated

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank has the embedding: tokens come in, and not the stream of the stage before."""
        return self.stage.start == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the head: a loss or logits go out, and not the stream."""
        return self.stage.stop == self.config.layers

    @property
    def stream_features(self) -> int:
        """Features of the residual stream on this rank."""
        return self.config.dim // (self.group.size if get_strategy(self.config.strategy).shards_features else 1)

    @property
    def repeated_parameters(self) -> frozenset[str]:
        """Names of parameters of this stage that an earlier one holds as well: a shared embedding."""
        tied = self.config.tie_embeddings and self.is_last_stage and not self.is_first_stage
        return frozenset({"embedding.weight"}) if tied else frozenset()

    @property
    def _like(self) -> Tensor:
        """A parameter of the model's device and dtype."""
        return next(self.parameters())

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of the targets over all positions of (batch, t) tokens, the same on every rank of the
        mesh. No rank holds all logits.
        """
        return self(tokens, targets)

    def logits(self, tokens: Tensor, cache: Cache | None = None, *, last: bool = False) -> Tensor:
        """Logits over the full vocabulary, (batch, t, vocab), or with ``last`` those of the last position, (batch, 1,
        vocab). With a cache, positions continue from the cached ones, the cache is extended and no gradient recorded.
        Every stage of a pipeline calls this with the same tokens; all but the last return what they send.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            if self.stages is None:
                return self(tokens, cache=cache, last=last)
            stream = torch.empty(*tokens.shape, self.stream_features, dtype=self._like.dtype, device=self._like.device)
            x = tokens if self.is_first_stage else stream
            return relay(lambda x: self(x, cache=cache, last=last), x, self.stages)

    def new_cache(self, batch: int, length: int | None = None) -> Cache:
        """An empty cache for ``batch`` rows of up to ``length`` positions, by default the model's context. It holds
        this rank's heads only.
        """
        config = self.config
        if self.mesh is not None and get_strategy(config.strategy).shards_rows:
            raise ValueError(f"{config.strategy} has no cache on several ranks: load the model as megatron")
        length = config.context if length is None else length
        positive(batch=batch, length=length)
        if length > config.context:
            raise ValueError(f"a cache of {length} positions is longer than the model's context of {config.context}")
        shape = len(self.stage), batch, config.kv_heads // self.group.size, length, config.head_dim
        keys, values = (torch.zeros(shape, device=self._like.device, dtype=self._like.dtype) for _ in range(2))
        with torch.no_grad():
            return Cache(keys, values, head=self._tied_rows())

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, *, cache: Cache | None = None, last: bool = False
    ) -> Tensor:
        """The loss if targets are given, otherwise logits. `loss` and `logits` call this, so that hooks run.

        A stage of a pipeline takes the stream of the stage before in place of tokens, and all but the last return it.
        """
        before = 0 if cache is None else cache.position
        self._check(tokens, targets, before)
        if cache is not None:
            cache.check_room(*tokens.shape[:2])
        where = slice(tokens.shape[1]) if cache is None else cache.positions(tokens.shape[1])
        cos, sin = (table[where] for table in self._rotary())
        # Sent before anything else: it is as large as an exchange of the layers, and needed last.
        parts = self._parts_of(tokens, targets)
        weight: PrefetchedWeight | None = None
        if targets is not None and self.is_last_stage:
            tied = self.embedding.weight if self.config.tie_embeddings else None
            weight = self.head.send_weight(targets.numel(), tied, parts)
        if targets is not None and parts > 1:
            return self._interleaved_loss(tokens, targets, cos, sin, weight, parts)
        x = self.embedding(tokens) if self.is_first_stage else tokens
        if self.config.ladder:
            (x,) = interleave_microbatches([self._in_parts(x, cos, sin, cache)])
        for layer in (self.layers[index] for index in self.stage if not self.config.ladder):
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, cos, sin, cache)
        if cache is not None:
            cache.position += tokens.shape[1]
        if not self.is_last_stage:
            return x
        if weight is not None and targets is not None:
            return row_cross_entropy(self.head(x, weight), targets, group=self.group)  # logits: (batch t / R, V)
        rows = self._tied_rows() if cache is None else cache.head
        logits = self.head(x[:, -1:] if last else x, rows)  # this rank's: (batch, t, V / R)
        if targets is None:
            return gather_features(logits, self.group)
        return vocabulary_cross_entropy(logits, targets, group=self.group)

    def _parts_of(self, tokens: Tensor, targets: Tensor | None) -> int:
        """The number of interleaved parts of a batch. Hooks of layers, FSDP's among them, would not run then."""
        parts = self.interleave
        if parts == 1 or targets is None or tokens.shape[0] % parts or torch.compiler.is_compiling():
            return 1
        own_forward = (Layer, ParallelLayer, Attention, SwiGLU)  # which does not run then
        bypassed = [m for m in self.layers.modules() if isinstance(m, own_forward) or hasattr(m, "begin")]
        hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
        if not any(getattr(module, kind) for module in bypassed for kind in hooks):
            return parts
        message = f"interleave={parts} has no effect: the layers have hooks, which run on whole batches only"
        warnings.warn(message, UserWarning, stacklevel=2)
        return 1

    def _interleaved_loss(
        self, tokens: Tensor, targets: Tensor, cos: Tensor, sin: Tensor, weight: PrefetchedWeight | None, parts: int
    ) -> Tensor:
        rows = self._tied_rows() if weight is None else None

        def part(tokens: Tensor, targets: Tensor) -> Part:
            x = yield from self._in_parts(self.embedding(tokens), cos, sin)
            if weight is None:
                return vocabulary_cross_entropy(self.head(x, rows), targets, group=self.group)
            begun = self.head.begin(x)
            yield
            return row_cross_entropy(self.head.end(begun, weight.whole()), targets, group=self.group)

        chunks = zip(tokens.chunk(parts), targets.chunk(parts), strict=True)
        return torch.stack(interleave_microbatches([part(*chunk) for chunk in chunks])).mean()

    def _in_parts(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None = None) -> Part:
        """The layers, with other parts of the batch in turn. In a ladder x_i = x_(i-1) + f_i(x_(i-2)): the exchange of
        an output projection overlaps with the input projection after it, whose own begins before what lies between
        the two. Backward has the opposite order, with the same overlap.
        """
        sublayers = [each for layer in self.layers for each in cast(Layer, layer).sublayers]
        if not self.config.ladder:
            for into, mix, back in sublayers:
                end = _begin(into, x)
                yield
                end = _begin(back, mix(end(), cos, sin))
                yield
                x = x + end()
            return x
        split = self.group.size > 1 and self.group.inter_block is None and not torch.compiler.is_compiling()
        end, late = _begin(sublayers[0][0], x, split), None
        for (_, mix, back), after in zip(sublayers, [*sublayers[1:], None], strict=True):
            yield
            projected = end()
            x = x if late is None else x + late()
            end = end if after is None else _begin(after[0], x, split)
            late = _begin(back, mix(projected, cos, sin, cache), split)
        assert late is not None
        return x + late()

    def embed(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The stream before the first layer, this rank's features of it, and the rotary tables of its positions: the
        arguments of a layer.
        """
        if self.config.ladder:
            raise ValueError("healing does not support models with ladder")
        self._check(tokens, None, 0)
        cos, sin = (table[: tokens.shape[1]] for table in self._rotary())
        return self.embedding(tokens), cos, sin

    def local_logits(self, x: Tensor) -> Tensor:
        """This rank's logits (batch, t, V / R) of the stream after the last layer."""
        return self.head(x, self._tied_rows())

    def _tied_rows(self) -> Tensor | None:
        tied = self.config.tie_embeddings and self.is_last_stage
        return self.head.tied_rows(self.embedding.weight) if tied else None

    def _rotary(self) -> tuple[Tensor, Tensor]:
        """The cached tables, made at first use and again after the model's device or dtype has changed."""
        like = self._like
        dtype = torch.promote_types(like.dtype, torch.float32)
        tables = self._tables
        if tables is None or tables[0].device != like.device or tables[0].dtype != dtype:
            config = self.config
            rates = rotary_rates(config.head_dim, config.rope_base, config.rope_scaling)
            self._tables = tables = rotary_tables(config.context, rates, device=like.device, dtype=dtype)
        return tables

    def _check(self, tokens: Tensor, targets: Tensor | None, before: int) -> None:
        if self.is_first_stage and tokens.dim() != 2:
            raise ValueError(f"tokens must be (batch, positions), got shape {tuple(tokens.shape)}")
        if tokens.device != self._like.device:  # tokens on the meta device would give uninitialized memory
            raise ValueError(f"the input is on {tokens.device} and the model on {self._like.device}: move one of them")
        if (positions := before + tokens.shape[1]) > (context := self.config.context):
            raise ValueError(f"{positions} positions are more than the model's context of {context}")
        if targets is not None and targets.shape != tokens.shape[:2]:
            raise ValueError(f"targets of shape {tuple(targets.shape)} for tokens of shape {tuple(tokens.shape)}")
        if torch.compiler.is_compiling() or isinstance(tokens, FakeTensor) or tokens.device.type != "cpu":
            return  # on other devices, reading the values would synchronize
        for name, given in (("tokens", tokens if self.is_first_stage else None), ("targets", targets)):
            if given is not None and given.numel():
                check_tokens(name, given, self.config.vocab)


def next_token(model: GPT, inputs: Tensor, cache: Cache, sample: Callable[[Tensor], Tensor]) -> Tensor:
    """The token of each row after (batch, t) inputs, selected from (batch, vocab) logits, on every rank: ranks that
    share layers all have the same logits, and the last stage of a pipeline gives its tokens to the others.
    """
    logits = model.logits(inputs, cache, last=True)
    token = sample(logits[:, -1]) if model.is_last_stage else inputs.new_empty(len(inputs))
    if model.stages is not None:
        dist.broadcast(token, group=model.stages.get_group(), group_src=model.stages.size() - 1)
    return token


def check_tokens(name: str, tokens: Tensor, vocab: int) -> None:
    """Raise ValueError if a token is not in the vocabulary: an accelerator would abort, or compute something else."""
    low, high = (int(token) for token in tokens.aminmax())
    if low < 0 or high >= vocab:
        raise ValueError(f"{name} must be from 0 to {vocab - 1}, got {low if low < 0 else high}")
