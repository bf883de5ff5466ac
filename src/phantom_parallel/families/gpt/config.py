"""The configuration of a GPT: its sizes, which are validated on construction."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import gcd, lcm
from typing import Any, ClassVar, Literal, get_args

from phantom_parallel.utils.layout import (
    MAX_FEATURES,
    MAX_LAYERS,
    check_at_most,
    check_block_ranks,
    check_inside,
    nearest_divisors,
    positive,
    stage_layers,
)
from phantom_parallel.utils.parsing import is_finite
from phantom_parallel.utils.strategies import Strategy, get_strategy

GPTStrategy = Literal["phantom", "megatron", "dense", "fsdp", "pipeline"]
STRATEGIES: tuple[GPTStrategy, ...] = get_args(GPTStrategy)


MAPS = ("qkv", "out", "gate_up", "down")  # of a layer, in the order of its ghosts
_LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_context")


@dataclass(frozen=True)
class RopeScaling:
    """Slower rotation of position embeddings, for contexts longer than those of the original training.

    Args:
        kind: ``linear`` divides all rates by ``factor``; ``llama3`` divides those of long wavelengths only.
        factor: The divisor.
        low_freq_factor: For ``llama3``: wavelengths above original_context / low_freq_factor are divided fully.
        high_freq_factor: For ``llama3``: wavelengths below original_context / high_freq_factor are kept.
        original_context: For ``llama3``: positions of the original training.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_context: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ValueError(f"rope_scaling must be of the kind linear or llama3, got {self.kind!r}")
        for name in ("factor", *(_LLAMA3 if self.kind == "llama3" else ())):
            value = getattr(self, name)
            if not is_finite(value) or value <= 0:
                raise ValueError(f"{name} of rope_scaling must be a positive number, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class GPTDimensions:
    """The sizes of a GPT as options have them, apart from the vocabulary and from how it is parallelised."""

    dim: int
    """Features of the residual stream."""
    layers: int
    """Number of layers, each of attention and SwiGLU."""
    heads: int
    """Query heads."""
    kv_heads: int | None = None
    """Key and value heads; by default as many as query heads."""
    hidden: int | None = None
    """Hidden features of the SwiGLU; by default 8/3 of dim, rounded up to a multiple of 64 and of the blocks."""
    context: int
    """Context length in tokens."""
    tie_embeddings: bool = False
    """Let the head share the embedding's weight."""
    parallel_block: bool = False
    """Attention and SwiGLU side by side after one norm, as in GPT-J and PaLM: two exchanges of a layer instead of
    four. Another function than the default, with the same number of weights but for norms and ghosts."""


@dataclass(frozen=True)
class GPTConfig:
    """The architecture of a GPT, independent of the number of ranks.

    Args:
        vocab: Number of tokens.
        dim: Features of the residual stream.
        layers: Number of layers, of attention and SwiGLU each.
        heads: Number of query heads.
        kv_heads: Number of heads of keys and values, ``heads`` by default.
        hidden: Width of the SwiGLU; by default 8/3 ``dim``, rounded up to a multiple of 64 and of ``blocks``.
        context: Maximum number of positions.
        strategy: How the model is sharded.
        blocks: As for `PhantomLinear`, for the strategy ``phantom`` only. It must divide the features, heads, hidden
            width and vocabulary.
        ghosts: As for `PhantomLinear`, for the strategy ``phantom`` only.
        tie_embeddings: Whether the head shares the embedding's weight.
        parallel_block: Whether attention and SwiGLU work side by side on one norm of the stream, with two exchanges of
            a layer instead of four; ``kv_heads`` must then divide ``hidden``.
        rope_base: Base of the rotary position embedding.
        norm_eps: Epsilon of the norms.
        qkv_bias: Whether the projection to queries, keys and values has a bias.
        rope_scaling: Scaling of the rotary position embedding.
        layer_ghosts: For the strategy ``phantom``, ghosts of each layer's maps (qkv, out, gate_up, down) in place of
            ``ghosts``, which is then only the default of new layers.
        hidden_groups: Number of pieces of the hidden width, each with its gate beside its up projection. A rank holds
            whole pieces. By default the greatest common divisor of ``hidden`` and ``kv_heads``.
    """

    family: ClassVar[str] = "gpt"
    renamed: ClassVar[dict[str, str]] = {"tied": "tie_embeddings"}  # earlier names of fields, in older files

    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int = None  # type: ignore[assignment]  # a number once made
    hidden: int = None  # type: ignore[assignment]  # a number once made
    context: int = 1024
    strategy: GPTStrategy = "phantom"
    blocks: int | None = None
    ghosts: int | None = None
    tie_embeddings: bool = False
    parallel_block: bool = False
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    rope_scaling: RopeScaling | None = None
    layer_ghosts: tuple[tuple[int, int, int, int], ...] | None = None
    hidden_groups: int = None  # type: ignore[assignment]  # a number once made

    def __post_init__(self) -> None:
        strategy = get_strategy(self.strategy, among=STRATEGIES)
        positive(vocab=self.vocab, dim=self.dim, layers=self.layers, heads=self.heads, context=self.context)
        check_at_most(MAX_FEATURES, vocab=self.vocab, dim=self.dim, context=self.context)
        check_at_most(MAX_LAYERS, layers=self.layers)
        for name in ("tie_embeddings", "qkv_bias"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        for name in ("rope_base", "norm_eps"):
            value = getattr(self, name)
            if not is_finite(value) or value <= 0:
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        strategy.check_blocks(self.blocks, self.ghosts)
        if self.blocks is not None:
            positive(blocks=self.blocks, ghosts=self.ghosts)
            if self.blocks < 2:
                raise ValueError("blocks=1 leaves no other block to show ghosts to: use at least 2, or dense")
        self._set_defaults()
        self._set_rope_scaling()
        self._check_heads()
        self._check_parallel_block()
        if self.blocks is not None:
            self._check_division_into_blocks()
        self._set_layer_ghosts()

    def _set_rope_scaling(self) -> None:
        """Make `RopeScaling` of the object that a file has."""
        given = self.rope_scaling
        if given is None or isinstance(given, RopeScaling):
            return
        try:
            object.__setattr__(self, "rope_scaling", RopeScaling(**given))
        except TypeError:
            names = ", ".join(field.name for field in fields(RopeScaling))
            raise ValueError(f"rope_scaling must be an object with {names}, got {given!r}") from None

    def _set_layer_ghosts(self) -> None:
        """Check the ghosts of each layer's maps, and make tuples of the lists that a file has."""
        given = self.layer_ghosts
        if given is None:
            return
        if self.blocks is None:
            raise ValueError(f"layer_ghosts belong to the strategy phantom, not to {self.strategy}: leave them out")
        sound = isinstance(given, list | tuple) and len(given) == self.layers
        if not sound or not all(isinstance(row, list | tuple) and len(row) == len(MAPS) for row in given):
            raise ValueError(f"layer_ghosts must have {len(MAPS)} numbers for each of {self.layers} layers")
        for layer, row in enumerate(given):
            for name, ghosts, features in zip(MAPS, row, (*[self.dim] * 3, self.hidden), strict=True):
                positive(**{f"layer_ghosts[{layer}].{name}": ghosts})
                if ghosts > features // self.blocks:
                    raise ValueError(
                        f"layer_ghosts[{layer}].{name}={ghosts} is larger than a block of "
                        f"{features // self.blocks} features"
                    )
        object.__setattr__(self, "layer_ghosts", tuple(tuple(row) for row in given))

    def _set_defaults(self) -> None:
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.hidden is None:
            step = lcm(64, self.blocks or 1)
            object.__setattr__(self, "hidden", -(-8 * self.dim // (3 * step)) * step)
        positive(kv_heads=self.kv_heads, hidden=self.hidden)
        if self.hidden_groups is None:
            object.__setattr__(self, "hidden_groups", gcd(self.hidden, self.kv_heads))
        positive(hidden_groups=self.hidden_groups)
        if self.hidden % self.hidden_groups:
            near = nearest_divisors(self.hidden, self.hidden_groups)
            raise ValueError(f"hidden_groups={self.hidden_groups} does not divide hidden={self.hidden}: {near} would")
        check_at_most(MAX_FEATURES, hidden=self.hidden)

    def _check_heads(self) -> None:
        for name, divisor, total in (("heads", self.heads, "dim"), ("kv_heads", self.kv_heads, "heads")):
            if getattr(self, total) % divisor:
                near = nearest_divisors(getattr(self, total), divisor)
                raise ValueError(f"{name}={divisor} does not divide {total}={getattr(self, total)}: {near} would")
        if self.head_dim % 2:
            raise ValueError(
                f"a head of {self.head_dim} features (dim={self.dim} over heads={self.heads}) is odd: "
                "rotary position embeddings need an even number"
            )

    def _check_parallel_block(self) -> None:
        if not isinstance(self.parallel_block, bool):
            raise ValueError(f"parallel_block must be true or false, got {self.parallel_block!r}")
        if self.parallel_block and self.hidden % self.kv_heads:
            near = -(-self.hidden // self.kv_heads) * self.kv_heads
            raise ValueError(
                f"with parallel_block, kv_heads={self.kv_heads} must divide hidden={self.hidden}: hidden={near} would"
            )

        if self.parallel_block and (self.qkv_bias or self.layer_ghosts is not None):
            raise ValueError("parallel_block has neither qkv_bias nor layer_ghosts: leave them out")

    def _check_division_into_blocks(self) -> None:
        assert self.blocks is not None
        assert self.ghosts is not None
        for name in ("dim", "heads", "kv_heads", "hidden", "vocab", "hidden_groups"):
            value = getattr(self, name)
            if value % self.blocks:
                raise ValueError(
                    f"blocks={self.blocks} does not divide {name}={value}: "
                    f"{name}={-(-value // self.blocks) * self.blocks} would be whole blocks"
                )
        smallest = min(self.dim, self.hidden) // self.blocks
        if self.ghosts > smallest:
            raise ValueError(
                f"ghosts={self.ghosts} is larger than a block of {smallest} features "
                f"(dim={self.dim}, hidden={self.hidden} over {self.blocks} blocks): at most {smallest}"
            )

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return self.dim // self.heads

    @property
    def qkv_features(self) -> int:
        """Features of queries, keys and values together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def ghosts_of_layers(self) -> tuple[tuple[int | None, ...], ...]:
        """Ghosts of qkv, out, gate_up and down of each layer; None for a strategy without ghosts."""
        return self.layer_ghosts or ((self.ghosts,) * len(MAPS),) * self.layers

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one head of keys and values."""
        return self.heads // self.kv_heads

    @staticmethod
    def older_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings that files of earlier releases do not have: the pieces of a phantom model were its blocks."""
        return {"hidden_groups": settings.get("blocks")}

    def check_ranks(self, ranks: int) -> None:
        """Raise ValueError if ``ranks`` ranks cannot share this model."""
        strategy = get_strategy(self.strategy)
        strategy.check_ranks(ranks)
        if strategy.splits_depth:
            stage_layers(self.layers, ranks)
        if not strategy.splits_layers:
            return
        if self.blocks is not None:
            check_block_ranks(self.blocks, ranks)
            for ghosts in {ghosts for row in self.ghosts_of_layers for ghosts in row if ghosts is not None}:
                check_inside(self.blocks, ranks, "ghosts", ghosts)
        if self.blocks is None or ranks > self.blocks:
            names = ["kv_heads", "hidden", "vocab"] + (["dim"] if self.blocks else [])
            names += [] if self.parallel_block else ["hidden_groups"]
            for name in names:
                if getattr(self, name) % ranks:
                    fit = gcd(*(getattr(self, name) for name in names))
                    raise ValueError(
                        f"{ranks} ranks do not divide {name}={getattr(self, name)}: run on a number of ranks that "
                        f"divides {fit}"
                    )


def check_interleave(
    interleave: int, strategy: Strategy, ranks: int, blocks: int | None, activation_checkpointing: bool
) -> None:
    """Raise ValueError if parts of a batch cannot take turns."""
    positive(interleave=interleave)
    if interleave == 1:
        return
    if strategy.shards_rows or strategy.splits_depth:
        raise ValueError(
            f"interleave={interleave} is for strategies that cut layers over ranks, not for {strategy.name}"
        )
    if activation_checkpointing:
        raise ValueError(f"interleave={interleave} cannot be combined with activation_checkpointing: leave one out")
    if blocks is not None and ranks > blocks:
        raise ValueError(f"interleave={interleave} needs at most as many ranks as blocks={blocks}, got ranks={ranks}")
