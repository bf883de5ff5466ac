"""Feed-forward networks for the planner, dry runs and timed steps: their sizes, and the shapes made of them."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from phantom_parallel.cost.sizes import Layout, ModelSizes
from phantom_parallel.cost.terms import Shape, optimizer_of
from phantom_parallel.families.ffn.config import FFNDimensions
from phantom_parallel.families.ffn.cost import FFNShape

if TYPE_CHECKING:
    from phantom_parallel.families.ffn.train_config import FFNTrainConfig


@dataclass(frozen=True, kw_only=True)
class FFNSizes(FFNDimensions, ModelSizes):
    """The sizes of an FFN to plan or to dry-run."""

    family: ClassVar[str] = "ffn"
    example: ClassVar[dict[str, Any]] = {"width": 16384, "depth": 4}

    @property
    def summary(self) -> str:
        ends = "" if self.model_features == (self.width, self.width) else ", {:,} in, {:,} out"
        return f"width {self.width:,}, depth {self.depth}{ends.format(*self.model_features)}"

    @property
    def maps(self) -> tuple[tuple[int, int], ...]:
        return tuple(dict.fromkeys(self.features_of(index) for index in self.distinct_layers))

    def shape(self, layout: Layout, *, batch: int, **run: Any) -> FFNShape:
        return FFNShape(**asdict(self), **layout._asdict(), batch=batch, **run)


def shape_of(config: "FFNTrainConfig") -> FFNShape:
    """The shape of one step of a training."""
    model = ("width", "depth", "bias", "activation", "in_features", "out_features")
    layout = ("strategy", "ranks", "blocks", "ghosts", "dp", "wire", "micro_batches", "reshard_after_forward")
    return FFNShape(
        **{name: getattr(config, name) for name in (*model, *layout)},
        batch=config.batch // config.dp,
        optimizer=optimizer_of(config.optimizer, config.momentum),
    )


def step_shapes(ranks: int, held_out: bool) -> list[dict[str, Shape]]:
    """Steps that are timed on local ranks.

    Calibration has steps from layers that are all overhead to layers that fill the memory. Held out are widths, batches
    and depths that calibration does not measure as such.
    """
    if held_out:
        sizes = (
            (1536, 3, 48, 8),
            (1536, 2, 192, 16),
            (3072, 2, 48, 16),
            (3072, 3, 96, 32),
            (768, 4, 96, 8),
            (768, 2, 24, 4),
        )
        return [_pair(ranks, *size, blocks) for size in sizes for blocks in (ranks, 2 * ranks)]
    sizes = (
        (64 * ranks, 4, 16, 8),
        (512, 3, 64, 8),
        (1024, 2, 32, 8),
        (2048, 2, 32, 8),
        (2048, 3, 128, 8),
        (4096, 2, 32, 8),
    )
    return [_pair(ranks, *size, max(ranks, 2)) for size in sizes]


def _pair(ranks: int, width: int, depth: int, batch: int, ghosts: int, blocks: int) -> dict[str, Shape]:
    layouts = (Layout("phantom", ranks, 1, blocks, ghosts), Layout("tensor", ranks, 1))
    sizes = FFNSizes(width=width, depth=depth)
    return {layout.strategy: sizes.shape(layout, batch=batch, optimizer="sgd") for layout in layouts}
