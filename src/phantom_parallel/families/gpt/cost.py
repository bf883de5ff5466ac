"""Cost terms of transformers: what one rank of a `phantom_parallel.GPT` computes, sends and keeps.

T rows (sequences times positions) go through each part, in words a row and rank:

    part          phantom                                        megatron, and dense with R = 1
    embedding     -                                              all-reduce  n
    qkv, gate_up  all-gather  qk + 1   reduce-scatter  qk + 1    -                      backward  all-reduce  n
    attention     -                                              -
    out, down     all-gather  qk       reduce-scatter  qk        all-reduce  n          -
    head          see `head_cost`                                -                      backward  all-reduce  n
    loss          see `head_cost`                                all-gather  3

n: features of the stream, m = n / R; q: blocks of a rank, k: ghosts. The one more word is the norm's squares forward,
and backward its share of their gradient. Squares and the loss's numbers are float32 or better: with words of 2 bytes
they take two each.

With attention and SwiGLU in parallel, qkv and gate_up are one map, and out and down are one.

Attention is Q K^T and A V, both of all positions: a causal mask saves nothing in these counts, as in torch's own.
Backward computes Q K^T again, as fused kernels do. ``prefill`` and ``decode`` are forward passes that fill a cache.
Parts are named as the modules are.

On R = p t ranks, t for each of p blocks, the maps have the exchanges of two levels (`cost.terms`), and an all-gather or
reduce-scatter of all ranks is one across blocks and one inside of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self, get_args

from phantom_parallel.cost.terms import (
    OPTIMIZER_STATES,
    Exchange,
    LayerCost,
    Memory,
    Optimizer,
    Shape,
    in_turns,
)
from phantom_parallel.cost.whole_layers import Stage, check_rows
from phantom_parallel.families.gpt.config import GPTConfig, GPTStrategy, check_interleave
from phantom_parallel.families.gpt.head_cost import head_cost, head_in_turns
from phantom_parallel.families.gpt.layer_cost import embedding_cost, layer_costs
from phantom_parallel.families.gpt.whole_layers_cost import fsdp_costs, pipeline_costs
from phantom_parallel.utils.layout import positive
from phantom_parallel.utils.strategies import StrategyName, get_strategy
from phantom_parallel.utils.wire import WireFormat

Mode = Literal["train", "prefill", "decode"]
MODES: tuple[str, ...] = get_args(Mode)


@dataclass(frozen=True)
class GPTShape(Shape):
    """A transformer and how it is run: ``ranks`` share it, ``dp`` copies of that work on ``batch`` sequences each.

    Args: those of the model are `GPTConfig`'s.
        sequence: positions of a sequence that a pass works on.
        batch: sequences of one copy.
        word_bytes: of parameters and activations: 8, 4 or 2.
        wire: format in which features travel between ranks.
        recompute: whether layers are computed again in backward instead of being kept.
        interleave: parts of the sequences that take turns in a training step.
        rank: which one; all have equal work.
        mode: a training step, or a forward pass that fills a cache: `prefill` and `decode` make those.
        past: positions that the cache holds already.
    """

    family: ClassVar[str] = "gpt"
    listed: ClassVar[tuple[str, ...]] = ("dim", "layers", "heads", "sequence", "batch")

    strategy: GPTStrategy
    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int = None  # type: ignore[assignment]  # a number once made
    hidden: int = None  # type: ignore[assignment]  # a number once made
    sequence: int = 1024
    ranks: int = 1
    batch: int = 1
    blocks: int | None = None
    ghosts: int | None = None
    dp: int = 1
    word_bytes: int = 4
    wire: WireFormat = "full"
    tie_embeddings: bool = False
    parallel_block: bool = False
    qkv_bias: bool = False
    layer_ghosts: tuple[tuple[int, int, int, int], ...] | None = None
    optimizer: Optimizer = "adam"
    recompute: bool = False
    interleave: int = 1
    rank: int = 0
    mode: Mode = "train"
    past: int = 0
    micro_batches: int | None = None
    reshard_after_forward: bool = True
    config: GPTConfig = field(init=False, repr=False, compare=False)
    _costs: tuple[LayerCost, ...] = field(init=False, repr=False, compare=False)
    _between: tuple[Exchange, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        positive(**{name: getattr(self, name) for name in ("sequence", "ranks", "batch", "dp")})
        if self.optimizer not in OPTIMIZER_STATES:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZER_STATES)}, got {self.optimizer!r}")
        if self.word_bytes not in (8, 4, 2):
            raise ValueError(f"word_bytes must be 8, 4 or 2, got {self.word_bytes!r}")
        get_strategy(self.strategy).check_wire(self.wire)
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank must be from 0 to {self.ranks - 1}, got {self.rank}")
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        if self.mode == "decode":
            positive(past=self.past)
        elif self.past != 0:
            raise ValueError(
                f"past belongs to decode, and {self.mode} starts with an empty cache: got past={self.past}"
            )
        config = GPTConfig(
            vocab=self.vocab,
            dim=self.dim,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            hidden=self.hidden,
            context=self.past + self.sequence,
            strategy=self.strategy,
            blocks=self.blocks,
            ghosts=self.ghosts,
            tie_embeddings=self.tie_embeddings,
            parallel_block=self.parallel_block,
            qkv_bias=self.qkv_bias,
            layer_ghosts=self.layer_ghosts,
        )
        config.check_ranks(self.ranks)
        check_interleave(self.interleave, get_strategy(self.strategy), self.ranks, self.blocks, self.recompute)
        if self.mode == "train" and self.batch % self.interleave:
            raise ValueError(f"interleave={self.interleave} does not divide the {self.batch} sequences of a copy")
        names = ("kv_heads", "hidden", "layer_ghosts")
        made = {"config": config} | {name: getattr(config, name) for name in names}
        for name, value in made.items():
            object.__setattr__(self, name, value)
        check_rows(self)
        parts, between = self._work_out()
        object.__setattr__(self, "_costs", parts)
        object.__setattr__(self, "_between", between)

    def _work_out(self) -> tuple[tuple[LayerCost, ...], tuple[Exchange, ...]]:
        """The parts, and the exchanges that belong to none of them."""
        strategy = get_strategy(self.strategy)
        if self.ranks == 1 or strategy.splits_layers:
            return tuple(self._parts()), ()
        if self.mode != "train":
            raise ValueError(f"the strategy {self.strategy} is for training: {self.mode} runs on ranks by megatron")
        return fsdp_costs(self) if self.stage is None else pipeline_costs(self, self.stage)

    @cached_property
    def stage(self) -> Stage | None:
        """The stage of the rank, of a pipeline on several ranks."""
        if self.ranks == 1 or self.micro_batches is None:
            return None
        return Stage(self.layers, self.ranks, self.rank, self.micro_batches)

    @classmethod
    def of(cls, config: GPTConfig, **run: Any) -> "GPTShape":
        """The shape of a model, for example ``GPTShape.of(model.config, sequence=256, batch=8, ranks=4)``."""
        sizes = (
            "vocab",
            "dim",
            "layers",
            "heads",
            "kv_heads",
            "hidden",
            "tie_embeddings",
            "parallel_block",
            "qkv_bias",
        )
        names = ("strategy", "blocks", "ghosts", "layer_ghosts", *sizes)
        return cls(**{name: getattr(config, name) for name in names}, **run)

    def with_strategy(self, strategy: StrategyName, **changes: Any) -> Self:
        return super().with_strategy(strategy, **{"layer_ghosts": None} | changes)

    def passes(self) -> dict[str, Self]:
        """A training step, a prefill of as long a prompt, and a token decoded after it. FSDP2 and pipelines train."""
        if self.mode != "train":
            return {}
        if self.ranks > 1 and not get_strategy(self.strategy).splits_layers:
            return {"train": self}
        return {"train": self, "prefill": self.prefill(), "decode": self.decode()}

    @property
    def step_name(self) -> str:
        return {"train": "one training step", "prefill": "a prompt"}.get(self.mode, f"one token after {self.past:,}")

    def prefill(self, prompt: int | None = None) -> Self:
        """A cache made and filled with prompts of so many positions, for the logits of each one's last."""
        return replace(self, mode="prefill", sequence=self.sequence if prompt is None else prompt, past=0)

    def decode(self, past: int | None = None) -> Self:
        """One more token for each sequence, after ``past`` positions."""
        return replace(self, mode="decode", past=self.sequence if past is None else past, sequence=1)

    @property
    def costs(self) -> tuple[LayerCost, ...]:
        return self._costs

    @property
    def model_exchanges(self) -> tuple[Exchange, ...]:
        return self._between

    def stages(self) -> list[tuple[Self, int]]:
        kinds = {0: self.ranks} if self.stage is None else self.stage.kinds()
        return [(replace(self, rank=rank), count) for rank, count in kinds.items()]

    def same_as(self, index: int) -> int:
        if self.stage is not None:
            return index
        if index in (0, len(self.costs) - 1):
            return index
        layer, part = divmod(index - 1, self.parts_of_layer)
        ghosts = self.config.ghosts_of_layers
        return 1 + ghosts.index(ghosts[layer]) * self.parts_of_layer + part

    @property
    def parts_of_layer(self) -> int:
        """qkv, attention, out, gate_up, down; in parallel qkv_gate_up, attention, out_down."""
        return 3 if self.parallel_block else 5

    @property
    def repeated(self) -> int:
        """The norms' weights where the stream is whole."""
        norms = (1 if self.parallel_block else 2) * self.layers + 1
        return 0 if self.strategy == "phantom" else norms * self.dim

    @property
    def memory(self) -> Memory:
        """In inference, activations are the cache, with the rows of a tied head where an exchange made them."""
        if self.mode == "train":
            kept, stage = super().memory, self.stage
            between = 0 if stage is None else stage.kept(self.rows // stage.micro_batches * self.dim)
            return replace(kept, activations=kept.activations + self.word_bytes * between)
        return Memory(self.word_bytes * self.parameters, 0, 0, self.word_bytes * self._cache_words())

    @property
    def rows(self) -> int:
        """T."""
        return self.batch * self.sequence

    @property
    def stream(self) -> int:
        """Features of the residual stream on a rank."""
        return self.dim // self.ranks if self.strategy == "phantom" else self.dim

    @property
    def heads_here(self) -> int:
        return self.heads // self.ranks

    @property
    def kv_here(self) -> int:
        return self.kv_heads // self.ranks

    @property
    def hidden_here(self) -> int:
        return self.hidden // self.ranks

    @property
    def precise_words(self) -> int:
        """Words that a float32 takes; a float64 where all are."""
        return max(1, 4 // self.word_bytes)

    @property
    def precise_bytes(self) -> int:
        return max(4, self.word_bytes)

    def _cache_words(self) -> int:
        config = self.config
        kept = 2 * self.layers * self.batch * self.kv_here * (self.past + self.sequence) * config.head_dim
        return kept + (self.vocab // self.ranks * self.dim if self.exchanges_rows else 0)

    @property
    def exchanges_rows(self) -> bool:
        """Whether a tied head's rows are another cut of the embedding than the embedding's own."""
        return self.tie_embeddings and self.strategy == "phantom" and self.ranks > 1

    def _parts(self) -> Iterator[LayerCost]:
        if self.interleave > 1 and self.mode == "train":
            part = replace(self, batch=self.batch // self.interleave, interleave=1)
            yield from (in_turns(cost, self.interleave) for cost in part.costs[:-1])
            yield head_in_turns(self, part)
            return
        yield self._only_forward(embedding_cost(self))
        made: dict[tuple[int | None, ...], list[LayerCost]] = {}
        for index, ghosts in enumerate(self.config.ghosts_of_layers):
            if ghosts not in made:
                made[ghosts] = [self._only_forward(part) for part in layer_costs(self, *ghosts)]
            yield from (replace(part, name=f"layers.{index}.{part.name}") for part in made[ghosts])
        yield self._only_forward(head_cost(self))

    def _only_forward(self, cost: LayerCost) -> LayerCost:
        """All of it for training; for inference nothing is kept and there is no backward."""
        if self.mode == "train":
            return cost
        products = tuple(product for product in cost.products if product.phase == "forward")
        exchanges = tuple(exchange for exchange in cost.exchanges if exchange.phase == "forward")
        streamed = cost.streamed[0], 0
        return replace(cost, products=products, exchanges=exchanges, kept=0, kept_bytes=0, streamed=streamed)

    def with_sums(self, exchange: Exchange, rows: int) -> Exchange:
        """An exchange that also carries one of the norm's sums for each row. A reduce-scatter adds up words."""
        each = self.word_bytes if exchange.op == "reduce_scatter" else self.precise_bytes
        return replace(exchange, extra_bytes=exchange.extra_bytes + rows * each)

    def norm_bytes(self, rows: int) -> int:
        """The norm of a whole stream keeps its input and that over its root mean square, in float32 or better."""
        return 2 * rows * self.dim * self.precise_bytes
