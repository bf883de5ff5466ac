"""Settings of a GPT and of its training. The texts under the fields are the help of commands."""

from dataclasses import dataclass, field
from math import gcd, lcm
from typing import Any, ClassVar, Literal

from phantom_parallel.train.config import TrainConfig
from phantom_parallel.utils.layout import BlockLayout, nearest_divisors, stage_layers
from phantom_parallel.utils.settings import NO_OPTION, Features, Layers, PositiveFloat, PositiveInt, Ranks, validate
from phantom_parallel.utils.strategies import get_strategy

GPTStrategy = Literal["phantom", "megatron", "dense", "lowrank", "fsdp", "pipeline"]
TokenizerName = Literal["bytes", "bpe"]
MODULES = ("attention.qkv.linear", "attention.out", "mlp.gate_up.linear", "mlp.down")  # in the order of their ghosts
LayerGhosts = tuple[PositiveInt, PositiveInt, PositiveInt, PositiveInt]
PYTHON = "python"
BYTES = 256
_MAX_VOCAB = 1 << 16  # tokens are cached in two bytes


@dataclass(frozen=True)
class RopeScaling:
    """Slower rotation of position embeddings, for contexts longer than those of the original training."""

    kind: Literal["linear", "llama3"]
    """``linear`` divides all rates by ``factor``; ``llama3`` divides those of long wavelengths only."""
    factor: PositiveFloat
    """The divisor."""
    low_freq_factor: PositiveFloat = 1.0
    """For ``llama3``: wavelengths above original_context / low_freq_factor are divided fully."""
    high_freq_factor: PositiveFloat = 4.0
    """For ``llama3``: wavelengths below original_context / high_freq_factor are kept."""
    original_context: PositiveInt = 8192
    """For ``llama3``: positions of the original training."""

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True)
class GPTConfig:
    """The architecture of a GPT, independent of the number of ranks.

    ``blocks`` must divide the features, heads, hidden width and vocabulary.
    """

    family: ClassVar[str] = "gpt"

    vocab: Features
    """Tokens of the vocabulary; in a training by default 256 for bytes and 1024 for bpe."""
    dim: Features
    """Features of the residual stream."""
    layers: Layers
    """Number of layers, each of attention and SwiGLU."""
    heads: PositiveInt
    """Query heads."""
    kv_heads: PositiveInt = None  # type: ignore[assignment]  # set on construction
    """Key and value heads; by default as many as query heads."""
    hidden: Features = None  # type: ignore[assignment]  # set on construction
    """Hidden features of the SwiGLU; by default 8/3 of dim, rounded up to a multiple of 64 and of the blocks."""
    context: Features = 1024
    """Context length in tokens."""
    strategy: GPTStrategy = "phantom"
    """How the model is sharded over ranks."""
    blocks: PositiveInt | None = None
    """Blocks that the features are divided into, for phantom; by default the larger of 4 and ranks."""
    ghosts: PositiveInt | None = None
    """Ghosts: values of each block that the other blocks receive, for phantom; by default 16."""
    low_rank: PositiveInt | None = None
    """Rank of every matrix of a layer, for lowrank; by default that with the parameters of the phantom model."""
    tie_embeddings: bool = False
    """Let the head share the embedding's weight."""
    parallel_block: bool = False
    """Attention and SwiGLU side by side after one norm, as in GPT-J and PaLM: two exchanges of a layer instead of
    four. Another function than the default, with the same number of weights but for norms and ghosts."""
    ladder: bool = False
    """Attention and SwiGLU read the stream without what the one before adds (ladder residual), so that its exchange
    overlaps with them. Another function than the default, with the same weights."""
    rope_base: PositiveFloat = field(default=10000.0, metadata=NO_OPTION)
    """Base of the rotary position embedding."""
    norm_eps: PositiveFloat = field(default=1e-5, metadata=NO_OPTION)
    """Epsilon of the norms."""
    qkv_bias: bool = field(default=False, metadata=NO_OPTION)
    """Whether the projection to queries, keys and values has a bias."""
    rope_scaling: RopeScaling | None = field(default=None, metadata=NO_OPTION)
    """Scaling of the rotary position embedding."""
    layer_ghosts: tuple[LayerGhosts, ...] | None = field(default=None, metadata=NO_OPTION)
    """For phantom, ghosts of qkv, out, gate_up and down of each layer in place of ``ghosts``, which is then only the
    default of new layers."""
    hidden_groups: PositiveInt = None  # type: ignore[assignment]  # set on construction
    """Groups of the hidden width, each with its gate beside its up projection, of which ranks hold whole ones; by
    default the greatest common divisor of hidden and kv_heads."""

    def __post_init__(self) -> None:
        validate(self)
        get_strategy(self.strategy).check_blocks(self.blocks, self.ghosts, self.low_rank)
        step = lcm(64, self.blocks or 1)
        self._fill("kv_heads", self.heads)
        self._fill("hidden", -(-8 * self.dim // (3 * step)) * step)
        self._fill("hidden_groups", gcd(self.hidden, self.kv_heads))
        for part, whole in (("heads", "dim"), ("kv_heads", "heads"), ("hidden_groups", "hidden")):
            divisor, total = getattr(self, part), getattr(self, whole)
            if total % divisor:
                near = nearest_divisors(total, divisor)
                raise ValueError(f"{part}={divisor} does not divide {whole}={total}: {near} would")
        if self.head_dim % 2:
            raise ValueError(f"dim / heads must be even for rotary embeddings, got {self.head_dim}")
        if self.parallel_block and (self.hidden % self.kv_heads or self.qkv_bias or self.layer_ghosts is not None):
            divides = f"kv_heads={self.kv_heads} must divide hidden={self.hidden}"
            raise ValueError(f"with parallel_block, {divides}, and qkv_bias and layer_ghosts must be left out")
        if self.ladder and self.strategy in ("fsdp", "pipeline"):
            raise ValueError(f"ladder is for strategies that cut layers over ranks, not {self.strategy}: leave it out")
        if self.layer_ghosts is not None and (self.blocks is None or len(self.layer_ghosts) != self.layers):
            raise ValueError(f"layer_ghosts are for phantom, {len(MODULES)} numbers for each of {self.layers} layers")
        self._check_parts()

    def _fill(self, name: str, value: int) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    def _check_parts(self, ranks: int = 1) -> None:
        """Raise ValueError if features cannot be divided into the blocks, or over ranks that share each layer."""
        self._check_multiples(self.blocks or 1, f"blocks={self.blocks} does")
        if self.blocks is not None:
            for row in set(self.ghosts_of_layers):
                for features, ghosts in zip(self.linear_features, row, strict=False):
                    assert ghosts is not None
                    BlockLayout(*features, self.blocks, ghosts, ranks)
        if ranks > (self.blocks or 1):
            self._check_multiples(ranks, f"{ranks} ranks do")

    def _check_multiples(self, parts: int, which: str) -> None:
        for name in ("dim", "heads", "kv_heads", "hidden", "vocab", "hidden_groups"):
            if (value := getattr(self, name)) % parts:
                raise ValueError(f"{which} not divide {name}={value}: {name}={-(-value // parts) * parts} would fit")

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return self.dim // self.heads

    @property
    def depth(self) -> int:
        """Number of layers, which the stages of a pipeline divide."""
        return self.layers

    @property
    def qkv_features(self) -> int:
        """Features of queries, keys and values together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def ghosts_of_layers(self) -> tuple[tuple[int | None, ...], ...]:
        """Ghosts of qkv, out, gate_up and down of each layer; None for a strategy without ghosts."""
        return self.layer_ghosts or ((self.ghosts,) * len(MODULES),) * self.layers

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one head of keys and values."""
        return self.heads // self.kv_heads

    @property
    def summary(self) -> str:
        """The sizes in words, for titles."""
        tied = (", tied" if self.tie_embeddings else "") + (", parallel blocks" if self.parallel_block else "")
        return (
            f"dim {self.dim:,}, {self.layers} layers, {self.heads} heads, context {self.context:,}, "
            f"vocabulary {self.vocab:,}{tied}{', ladder' if self.ladder else ''}"
        )

    @property
    def linear_features(self) -> tuple[tuple[int, int], ...]:
        """Input and output features of each kind of layer that phantom divides into blocks."""
        if self.parallel_block:
            return (self.dim, self.qkv_features + 2 * self.hidden), (self.dim + self.hidden, self.dim)
        into = (self.dim, self.qkv_features), (self.dim, self.dim), (self.dim, 2 * self.hidden)
        return *into, (self.hidden, self.dim)

    def check_ranks(self, ranks: int) -> None:
        """Raise ValueError if ``ranks`` ranks cannot share this model."""
        strategy = get_strategy(self.strategy)
        strategy.check_ranks(ranks)
        if strategy.splits_depth:
            stage_layers(self.layers, ranks)
        if strategy.splits_layers:
            self._check_parts(ranks)

    def check_stages(self, pp: int, interleave: int = 1) -> None:
        """Raise ValueError if the layers cannot be divided into ``pp`` stages of several ranks."""
        strategy = get_strategy(self.strategy)
        if pp > 1 and (strategy.shards_rows or strategy.splits_depth):
            raise ValueError(f"pp={pp} is for phantom, megatron and dense, not for {self.strategy}: leave it out")
        if pp > 1 and (interleave > 1 or self.ladder):
            raise ValueError(f"pp={pp} cannot be combined with interleave={interleave} or ladder: leave one out")
        stage_layers(self.layers, pp)


def check_interleave(interleave: int, config: GPTConfig, ranks: int, activation_checkpointing: bool) -> None:
    """Raise ValueError if parts of a batch cannot be interleaved, or sublayers of a ladder."""
    strategy, blocks = get_strategy(config.strategy), config.blocks
    if config.ladder and activation_checkpointing:
        raise ValueError("ladder cannot be combined with activation_checkpointing: leave one out")
    if interleave > 1 and (strategy.shards_rows or strategy.splits_depth or activation_checkpointing):
        others = "activation_checkpointing, or with the strategies fsdp and pipeline"
        raise ValueError(f"interleave={interleave} cannot be combined with {others}: leave one out")
    if interleave > 1 and blocks is not None and ranks > blocks:
        raise ValueError(f"interleave={interleave} needs at most as many ranks as blocks={blocks}, got ranks={ranks}")


@dataclass(frozen=True, kw_only=True)
class TextTrainConfig(TrainConfig):
    """A training on text. A row is a window of ``context`` tokens and the one after."""

    family: ClassVar[str] = "gpt"
    row: ClassVar[str] = "window"
    named_data: ClassVar[tuple[str, ...]] = (PYTHON,)
    may_change: ClassVar[frozenset[str]] = TrainConfig.may_change | {"activation_checkpointing"}

    batch: Features = 16
    """Windows of a step, over all data-parallel copies and micro-batches together."""
    max_grad_norm: PositiveFloat | None = 1.0
    pattern: str = "*.txt"
    """Files to read from a folder, at any depth."""
    max_bytes: PositiveInt = 8_000_000
    """Maximum length of the text in bytes; files are read in the order of their paths."""
    eval_windows: PositiveInt = 64
    """Number of windows to evaluate, from the tenth of the text that is held out."""
    activation_checkpointing: bool = False
    """Keep only the input of each layer, and compute the rest again in backward."""


@dataclass(frozen=True, kw_only=True)
class GPTTrainConfig(TextTrainConfig):
    """A training of a GPT on text. The loss is the mean cross-entropy in nats a token."""

    may_change: ClassVar[frozenset[str]] = TextTrainConfig.may_change | {"fsdp", "interleave", "pp"}
    model_defaults: ClassVar[dict[str, Any]] = {"vocab": None, "dim": 256, "layers": 4, "heads": 8, "context": 256}

    model: GPTConfig
    """The model."""
    data: str = PYTHON
    """The source of Python's standard library (python), or the path of a text file, or of a folder of text files."""
    tokenizer: TokenizerName = "bytes"
    """Bytes, or a byte-pair encoding trained on the text (bpe, which needs the tokenizers library)."""
    pp: Ranks = 1
    """Stages of a pipeline that the layers are divided into, with ``ranks`` ranks in each."""
    interleave: PositiveInt = 1
    """Parts of a micro-batch that are interleaved, so that exchanges of one overlap with products of the others: 2 on
    slow links."""
    fsdp: bool = False
    """Shard weights, gradients and optimizer states over the data-parallel copies (FSDP2), in place of replicas."""

    @classmethod
    def filled(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """The vocabulary follows the tokenizer: 256 for bytes, 1024 for bpe."""
        if settings.get("vocab") is None:
            settings["vocab"] = 4 * BYTES if settings.get("tokenizer") == "bpe" else BYTES
        return super().filled(settings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not BYTES <= self.model.vocab <= _MAX_VOCAB:
            raise ValueError(f"vocab must be from {BYTES}, for bytes, to {_MAX_VOCAB}, got {self.model.vocab}")
        strategy = get_strategy(self.strategy)
        if self.fsdp and (self.dp == 1 or strategy.shards_rows or self.stages > 1):
            needs = "at least 2 data-parallel copies by phantom, megatron or dense in one stage"
            raise ValueError(f"fsdp needs {needs}, got dp={self.dp}, pp={self.pp} and strategy={self.strategy!r}")
        self.model.check_stages(self.pp, self.interleave)
        check_interleave(self.interleave, self.model, self.ranks, self.activation_checkpointing)
        if self.micro_batch % self.interleave:
            near = nearest_divisors(self.micro_batch, self.interleave)
            raise ValueError(f"interleave={self.interleave} does not divide {self.micro_batch} rows: use {near}")
        if (self.interleave > 1 or self.model.ladder) and self.fsdp:
            raise ValueError("interleave and ladder cannot be combined with fsdp: leave one out")

    @property
    def vocab(self) -> int:
        """Tokens of the vocabulary, for what reads the text."""
        return self.model.vocab

    @property
    def context(self) -> int:
        """Tokens of a window."""
        return self.model.context

    @property
    def gathers_weights(self) -> bool:
        return self.fsdp or super().gathers_weights

    @property
    def replicas(self) -> int:
        return 1 if self.fsdp else self.dp
