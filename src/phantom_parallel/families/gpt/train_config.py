"""Settings of a GPT's training. The texts under the fields are the help of ``phantom train gpt``."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args

from phantom_parallel.families.gpt.config import GPTConfig, GPTDimensions, GPTStrategy, check_interleave
from phantom_parallel.train.config import TrainConfig
from phantom_parallel.utils.layout import nearest_divisors, positive
from phantom_parallel.utils.strategies import get_strategy

TokenizerName = Literal["bytes", "bpe"]
PYTHON = "python"
BYTES = 256
_MAX_VOCAB = 1 << 16  # tokens are cached in two bytes


@dataclass(frozen=True, kw_only=True)
class GPTSettings(GPTDimensions):
    """Default sizes of the model, apart from how it is parallelised."""

    dim: int = 256
    layers: int = 4
    heads: int = 8
    context: int = 256


@dataclass(frozen=True, kw_only=True)
class GPTTrainConfig(TrainConfig, GPTSettings):
    """A training of a GPT on text. A row is a window of ``context`` tokens and the one after, and the loss is the mean
    cross-entropy in nats a token.

    ``data`` is the source of Python's standard library (``python``), or the path of a text file or of a folder of them.
    """

    family: ClassVar[str] = "gpt"
    row: ClassVar[str] = "window"
    named_data: ClassVar[tuple[str, ...]] = (PYTHON,)
    renamed: ClassVar[dict[str, str]] = TrainConfig.renamed | {
        "recompute": "activation_checkpointing",
        "tied": "tie_embeddings",
    }
    may_change: ClassVar[frozenset[str]] = TrainConfig.may_change | {"activation_checkpointing", "fsdp", "interleave"}

    strategy: GPTStrategy = "phantom"
    """How the model is cut over ranks."""
    batch: int = 16
    """Windows of a step, over all data-parallel copies and micro-batches together."""
    max_grad_norm: float | None = 1.0
    """Clip the norm of the whole gradient to this."""
    seed: int = 0
    """Seed of the initial weights and of the windows of every step."""
    data: str = PYTHON
    """The source of Python's standard library (python), or the path of a text file, or of a folder of text files."""
    pattern: str = "*.txt"
    """Files to read from a folder, at any depth."""
    max_bytes: int = 8_000_000
    """Maximum length of the text in bytes; files are read in the order of their paths."""
    tokenizer: TokenizerName = "bytes"
    """Bytes, or a byte-pair encoding trained on the text (bpe, which needs the tokenizers library)."""
    vocab: int | None = None
    """Size of the vocabulary; by default 256 for bytes and 1024 for bpe."""
    eval_windows: int = 64
    """Number of windows to evaluate, from the tenth of the text that is held out."""
    activation_checkpointing: bool = False
    """Keep only the input of each layer, and compute the rest again in backward."""
    hidden_groups: int | None = None
    """Pieces of the hidden width, of which ranks hold whole ones; by default the greatest common divisor of hidden and
    kv_heads."""
    interleave: int = 1
    """Parts of a micro-batch that take turns, so that exchanges of one overlap with products of the others: 2 on slow
    links."""
    fsdp: bool = False
    """Shard weights, gradients and optimizer states over the data-parallel copies (FSDP2), in place of replicas."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer not in get_args(TokenizerName):
            names = ", ".join(get_args(TokenizerName))
            raise ValueError(f"tokenizer must be one of {names}, got {self.tokenizer!r}")
        self._fill("vocab", BYTES if self.tokenizer == "bytes" else 4 * BYTES)
        positive(vocab=self.vocab, max_bytes=self.max_bytes, eval_windows=self.eval_windows)
        assert self.vocab is not None
        if not BYTES <= self.vocab <= _MAX_VOCAB:
            raise ValueError(f"vocab={self.vocab} must be from {BYTES}, since every byte is a token, to {_MAX_VOCAB}")
        for name in ("activation_checkpointing", "fsdp"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        self.gpt().check_ranks(self.ranks)
        strategy = get_strategy(self.strategy)
        if self.fsdp and (strategy.shards_rows or strategy.splits_depth):
            raise ValueError(
                f"fsdp cuts the weights of copies by phantom, megatron or dense, got strategy={self.strategy!r}: "
                "leave it out, or use the strategy fsdp on more ranks"
            )
        check_interleave(self.interleave, strategy, self.ranks, self.blocks, self.activation_checkpointing)
        if self.micro_batch % self.interleave:
            raise ValueError(
                f"interleave={self.interleave} does not divide the {self.micro_batch} windows of a micro-batch: "
                f"use {nearest_divisors(self.micro_batch, self.interleave)}"
            )
        if self.interleave > 1 and (self.fsdp or self.compile):
            raise ValueError(f"interleave={self.interleave} cannot be combined with fsdp or compile: leave one out")
        if self.fsdp and self.dp == 1:
            raise ValueError(
                "fsdp cuts the weights over data-parallel copies, got dp=1: use at least 2, or leave it out"
            )

    @property
    def gathers_weights(self) -> bool:
        return self.fsdp or super().gathers_weights

    @property
    def replicas(self) -> int:
        return 1 if self.fsdp else self.dp

    def check_resumes(self, earlier: dict[str, Any], where: str) -> None:
        if "hidden_groups" not in earlier and self.blocks is not None:  # earlier releases: a phantom model's blocks
            same = self.gpt().hidden_groups == self.blocks
            earlier = {**earlier, "hidden_groups": self.hidden_groups if same else self.blocks}
        super().check_resumes(earlier, where)

    def gpt(self) -> GPTConfig:
        """Return the config of the model."""
        return GPTConfig(
            **{field.name: getattr(self, field.name) for field in fields(GPTConfig) if hasattr(self, field.name)}
        )
