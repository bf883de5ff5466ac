"""Initialisation that keeps the energy of a dense layer, and is the same on any number of ranks.

A dense layer draws W with variance 1/n_in. A phantom layer draws

    var L = 1/n_in      var C = 1/m_in      var D = 1/(p k)

so that a ghost has its block's mean square, the (p-1) k ghosts together carry (p-1)/p of the output's energy and L the
other 1/p. The gain of the activation goes to L and to D, and not to C as well: the product D C must carry it once.

Each block draws from a generator of its own, seeded by the layer's seed and the block's number, so that what a block
holds does not depend on the rank that holds it.
"""

from math import gcd

import torch
from torch import Tensor

_CHUNKS = 1024  # rows of a dense weight are drawn in up to this many pieces, each with its own generator


def draw_seed() -> int:
    """A seed for one layer from torch's default generator: ``torch.manual_seed`` decides it."""
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
    """Fill this rank's weights, ``held`` blocks from block ``first`` on."""
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
    """Fill this rank's rows of a dense weight, drawn in chunks that any number of ranks shares."""
    chunks = gcd(out_features, _CHUNKS)
    std = gain * weight.shape[1] ** -0.5
    if chunks % ranks:  # no common chunks: draw all and keep ours
        whole = torch.empty(out_features, weight.shape[1], dtype=weight.dtype, device=weight.device)
        init_rows(whole, None, out_features=out_features, rank=0, ranks=1, seed=seed, gain=gain)
        weight.copy_(whole.chunk(ranks)[rank])
    else:
        held = chunks // ranks
        for i, rows in enumerate(weight.view(held, -1, weight.shape[1])):
            rows.normal_(0.0, std, generator=_generator(weight.device, seed, rank * held + i))
    if bias is not None:
        bias.zero_()


@torch.no_grad()
def init_columns(weight: Tensor, *, first: int, held: int, seed: int, std: float) -> None:
    """Fill this rank's columns of a dense weight, ``held`` blocks of them from block ``first`` on."""
    for i, columns in enumerate(weight.chunk(held, 1)):
        drawn = torch.empty_like(columns, memory_format=torch.contiguous_format)
        columns.copy_(drawn.normal_(0.0, std, generator=_generator(weight.device, seed, first + i)))


def _generator(device: torch.device, seed: int, piece: int) -> torch.Generator:
    return torch.Generator(device).manual_seed((seed + piece * 0x9E3779B97F4A7C15) % (1 << 63))
