"""Transformers for the planner, dry runs and timed steps: their sizes, and the shapes made of them."""

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from phantom_parallel.cost.sizes import Layout, ModelSizes
from phantom_parallel.cost.terms import Shape, optimizer_of
from phantom_parallel.families.gpt.config import GPTDimensions
from phantom_parallel.families.gpt.cost import MODES, GPTShape
from phantom_parallel.utils.strategies import get_strategy

if TYPE_CHECKING:
    from phantom_parallel.families.gpt.train_config import GPTTrainConfig


@dataclass(frozen=True, kw_only=True)
class GPTSizes(GPTDimensions, ModelSizes):
    """The sizes of a transformer to plan or to dry-run. Its sequences fill the context."""

    family: ClassVar[str] = "gpt"
    modes: ClassVar[tuple[str, ...]] = MODES
    example: ClassVar[dict[str, Any]] = {"vocab": 32768, "dim": 4096, "layers": 4, "heads": 32, "context": 2048}

    vocab: int
    """Tokens of the vocabulary."""
    activation_checkpointing: bool = False
    """Keep only the input of each layer, and recompute its activations in backward."""
    interleave: int = 1
    """Parts of a copy's sequences that take turns in a training step, so that exchanges of one overlap with products of
    the others."""

    @property
    def summary(self) -> str:
        tied = (", tied" if self.tie_embeddings else "") + (", parallel blocks" if self.parallel_block else "")
        return (
            f"dim {self.dim:,}, {self.layers} layers, {self.heads} heads, context {self.context:,}, "
            f"vocabulary {self.vocab:,}{tied}"
        )

    @cached_property
    def maps(self) -> tuple[tuple[int, int], ...]:
        dense = self.shape(Layout("dense", 1, 1), batch=1)
        qkv = (self.heads + 2 * dense.kv_heads) * dense.config.head_dim
        if self.parallel_block:
            return (self.dim, qkv + 2 * dense.hidden), (self.dim + dense.hidden, self.dim)
        return (self.dim, qkv), (self.dim, self.dim), (self.dim, 2 * dense.hidden), (dense.hidden, self.dim)

    def shape(self, layout: Layout, *, batch: int, **run: Any) -> GPTShape:
        sizes = asdict(self)
        run |= {"sequence": sizes.pop("context"), "recompute": sizes.pop("activation_checkpointing")}
        if not get_strategy(layout.strategy).splits_layers:
            sizes["interleave"] = 1  # nothing to overlap
        return GPTShape(**sizes, **layout._asdict(), batch=batch, **run)


def shape_of(config: "GPTTrainConfig") -> GPTShape:
    """The shape of one step of a training."""
    return GPTShape.of(
        config.gpt(),
        sequence=config.context,
        ranks=config.ranks,
        batch=config.batch // config.dp,
        dp=config.dp,
        wire=config.wire,
        optimizer=optimizer_of(config.optimizer, config.momentum),
        recompute=config.activation_checkpointing,
        micro_batches=config.micro_batches,
        reshard_after_forward=config.reshard_after_forward or config.fsdp,
        interleave=config.interleave,
    )


def step_shapes(ranks: int, held_out: bool) -> list[dict[str, Shape]]:
    """Held-out steps that are timed on local ranks; calibration measures none of transformers."""
    if not held_out:
        return []
    found: list[dict[str, Shape]] = []
    for dim, layers, context, batch, ghosts in ((128, 3, 128, 4, 8), (256, 2, 64, 4, 8), (512, 2, 64, 2, 16)):
        sizes = GPTSizes(vocab=1024, dim=dim, layers=layers, heads=8, context=context)
        for blocks in (ranks, 2 * ranks):
            layouts = (Layout("phantom", ranks, 1, blocks, ghosts), Layout("megatron", ranks, 1))
            found.append({one.strategy: sizes.shape(one, batch=batch, optimizer="sgd") for one in layouts})
    return found
