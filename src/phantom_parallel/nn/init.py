"""Initialization that keeps the mean square of a dense layer's output, identical on any number of ranks.

A dense layer draws W with variance 1/n_in. A phantom layer draws

    var L = 1/n_in      var C = 1/m_in      var D = 1/(p k)

so that a ghost has its block's mean square, the (p-1) k ghosts together give (p-1)/p of the output's mean square and L
the other 1/p. The gain of the activation applies to L and D, and not to C as well: the product D C must have it once.

Each block has its own generator, seeded by the layer's seed and the block's index, so that its weights do not depend on
the rank that holds it. Ranks that share a block draw all of it and keep their parts. Weights are drawn on the CPU and
copied to their device: a seed gives the same model on every device.
"""

from math import gcd

import torch
from torch import Tensor

from phantom_parallel.utils.layout import BlockLayout

_CHUNKS = 1024  # rows of a dense weight are drawn in up to this many chunks, each with its own generator


def draw_seed() -> int:
    """A seed for one layer, drawn from torch's default generator."""
    return int(torch.randint(1 << 62, (), dtype=torch.int64))


@torch.no_grad()
def init_phantom(
    local: Tensor,
    compress: Tensor,
    decompress: Tensor,
    bias: Tensor | None,
    *,
    layout: BlockLayout,
    rank: int,
    seed: int,
    gain: float = 1.0,
) -> None:
    """Initialize this rank's weights: those of its blocks, or its part of those of a block that several ranks share."""
    p, k, own = layout.blocks, layout.ghosts, layout.blocks_of(rank)
    stds = gain * layout.in_features**-0.5, layout.block_in**-0.5, gain * (p * k) ** -0.5
    for i, block in enumerate(own):
        generator = _generator(seed, block)
        for weight, std in zip((local, compress, decompress), stds, strict=True):
            rows = weight.view(len(own), -1, weight.shape[1])[i]
            _draw_part(rows, 0, layout.inside, layout.place_of(rank), std, generator)
    if bias is not None:
        bias.zero_()


@torch.no_grad()
def init_rows(
    weight: Tensor, bias: Tensor | None, *, out_features: int, rank: int, ranks: int, seed: int, gain: float = 1.0
) -> None:
    """Initialize this rank's rows of a dense weight, in chunks that do not depend on the number of ranks."""
    chunks = gcd(out_features, _CHUNKS)
    std = gain * weight.shape[1] ** -0.5
    if chunks % ranks:  # a chunk would be shared by two ranks: draw all and keep this rank's
        full = torch.empty(out_features, weight.shape[1], dtype=weight.dtype, device=_cpu_or_meta(weight))
        init_rows(full, None, out_features=out_features, rank=0, ranks=1, seed=seed, gain=gain)
        weight.copy_(full.chunk(ranks)[rank])
    else:
        held = chunks // ranks
        for i, rows in enumerate(weight.view(held, -1, weight.shape[1])):
            _draw_part(rows, 0, 1, 0, std, _generator(seed, rank * held + i))
    if bias is not None:
        bias.zero_()


@torch.no_grad()
def init_columns(weight: Tensor, *, layout: BlockLayout, rank: int, seed: int, std: float) -> None:
    """Initialize this rank's columns of a dense weight: those of its blocks, or its part of a shared block's."""
    own = layout.blocks_of(rank)
    for block, columns in zip(own, weight.chunk(len(own), 1), strict=True):
        _draw_part(columns, 1, layout.inside, layout.place_of(rank), std, _generator(seed, block))


def _draw_part(part: Tensor, dim: int, parts: int, place: int, std: float, generator: torch.Generator) -> None:
    """Draw a block's weight and keep this rank's part of it, one of ``parts`` along ``dim``."""
    shape = [size * (parts if index == dim else 1) for index, size in enumerate(part.shape)]
    whole = torch.empty(shape, dtype=part.dtype, device=_cpu_or_meta(part))
    part.copy_(whole.normal_(0.0, std, generator=generator).chunk(parts, dim)[place])


def _cpu_or_meta(weight: Tensor) -> str:
    """Where to draw: values of the CPU's generator do not depend on the device that a weight is on."""
    return "meta" if weight.is_meta else "cpu"


def _generator(seed: int, piece: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed + piece * 0x9E3779B97F4A7C15) % (1 << 63))
