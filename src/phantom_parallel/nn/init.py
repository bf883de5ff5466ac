"""Initialization that keeps the mean square of a dense layer's output, identical on any number of ranks.

A dense layer draws W with variance 1/n_in. A phantom layer draws

    var L = 1/n_in      var C = 1/m_in      var D = 1/(p k)

so that a ghost has its block's mean square, the (p-1) k ghosts together give (p-1)/p of the output's mean square and L
the other 1/p. The gain of the activation applies to L and D, and not to C as well: the product D C must have it once.

Each block has its own generator, seeded by the layer's seed and the block's index, so that its weights do not depend on
the rank that holds it.
"""

from math import gcd

import torch
from torch import Tensor

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
    blocks: int,
    first: int,
    held: int,
    seed: int,
    gain: float = 1.0,
) -> None:
    """Initialize this rank's weights: ``held`` blocks, starting at block ``first``."""
    ghosts, block_in = compress.shape[0] // held, compress.shape[1]
    stds = (gain * (block_in * blocks) ** -0.5, block_in**-0.5, gain * (blocks * ghosts) ** -0.5)
    for i in range(held):
        generator = _generator(local.device, seed, first + i)
        for weight, std in zip((local, compress, decompress), stds, strict=True):
            weight.view(held, -1, weight.shape[1])[i].normal_(0.0, std, generator=generator)
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
        full = torch.empty(out_features, weight.shape[1], dtype=weight.dtype, device=weight.device)
        init_rows(full, None, out_features=out_features, rank=0, ranks=1, seed=seed, gain=gain)
        weight.copy_(full.chunk(ranks)[rank])
    else:
        held = chunks // ranks
        for i, rows in enumerate(weight.view(held, -1, weight.shape[1])):
            rows.normal_(0.0, std, generator=_generator(weight.device, seed, rank * held + i))
    if bias is not None:
        bias.zero_()


@torch.no_grad()
def init_columns(weight: Tensor, *, first: int, held: int, seed: int, std: float) -> None:
    """Initialize this rank's columns of a dense weight: ``held`` blocks, starting at block ``first``."""
    for i, columns in enumerate(weight.chunk(held, 1)):
        drawn = torch.empty_like(columns, memory_format=torch.contiguous_format)
        columns.copy_(drawn.normal_(0.0, std, generator=_generator(weight.device, seed, first + i)))


def _generator(device: torch.device, seed: int, piece: int) -> torch.Generator:
    return torch.Generator(device).manual_seed((seed + piece * 0x9E3779B97F4A7C15) % (1 << 63))
