"""Independent random streams, whose numbers do not depend on the rank that draws them."""

import torch


def derive_seed(seed: int, piece: int, *, purpose: int) -> int:
    """Derive the seed of one piece of one purpose, such as the rows of an epoch."""
    return (seed * 0x9E3779B97F4A7C15 + piece * 0xBF58476D1CE4E5B9 + purpose * 0x94D049BB133111EB) % (1 << 63)


def generator(seed: int, piece: int, *, purpose: int) -> torch.Generator:
    """Return a CPU generator seeded with `derive_seed`."""
    return torch.Generator().manual_seed(derive_seed(seed, piece, purpose=purpose))
