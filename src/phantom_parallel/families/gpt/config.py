"""The configuration of a GPT: its sizes, which are validated on construction."""

from dataclasses import dataclass
from math import gcd, lcm
from typing import ClassVar, Literal, get_args

from phantom_parallel.utils.layout import MAX_FEATURES, MAX_LAYERS, check_at_most, nearest_divisors, positive
from phantom_parallel.utils.strategies import get_strategy

GPTStrategy = Literal["phantom", "megatron", "dense"]
STRATEGIES: tuple[GPTStrategy, ...] = get_args(GPTStrategy)


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

    def __post_init__(self) -> None:
        strategy = get_strategy(self.strategy, among=STRATEGIES)
        positive(vocab=self.vocab, dim=self.dim, layers=self.layers, heads=self.heads, context=self.context)
        check_at_most(MAX_FEATURES, vocab=self.vocab, dim=self.dim, context=self.context)
        check_at_most(MAX_LAYERS, layers=self.layers)
        if not isinstance(self.tie_embeddings, bool):
            raise ValueError(f"tie_embeddings must be true or false, got {self.tie_embeddings!r}")
        for name in ("rope_base", "norm_eps"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        strategy.check_blocks(self.blocks, self.ghosts)
        if self.blocks is not None:
            positive(blocks=self.blocks, ghosts=self.ghosts)
            if self.blocks < 2:
                raise ValueError("blocks=1 leaves no other block to show ghosts to: use at least 2, or dense")
        self._set_defaults()
        self._check_heads()
        self._check_parallel_block()
        if self.blocks is not None:
            self._check_division_into_blocks()

    def _set_defaults(self) -> None:
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.hidden is None:
            step = lcm(64, self.blocks or 1)
            object.__setattr__(self, "hidden", -(-8 * self.dim // (3 * step)) * step)
        positive(kv_heads=self.kv_heads, hidden=self.hidden)
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

    def _check_division_into_blocks(self) -> None:
        assert self.blocks is not None
        assert self.ghosts is not None
        for name in ("dim", "heads", "kv_heads", "hidden", "vocab"):
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
    def queries_per_kv(self) -> int:
        """Query heads that share one head of keys and values."""
        return self.heads // self.kv_heads

    @property
    def hidden_groups(self) -> int:
        """Number of pieces of the hidden width, each with its gate beside its up projection; a rank holds complete
        pieces.
        """
        return self.blocks or gcd(self.hidden, self.kv_heads)

    def check_ranks(self, ranks: int) -> None:
        """Raise ValueError if ``ranks`` ranks cannot share this model."""
        get_strategy(self.strategy).check_ranks(ranks)
        if self.strategy == "dense":
            return
        if self.blocks is not None:
            if self.blocks % ranks:
                raise ValueError(
                    f"{ranks} ranks do not divide blocks={self.blocks}: "
                    f"run on {nearest_divisors(self.blocks, ranks)} ranks"
                )
        else:
            for name in ("kv_heads", "hidden", "vocab"):
                if getattr(self, name) % ranks:
                    fit = gcd(gcd(self.kv_heads, self.hidden), self.vocab)
                    raise ValueError(
                        f"{ranks} ranks do not divide {name}={getattr(self, name)}: run on a number of ranks that "
                        f"divides {fit}"
                    )
