"""One stream of random numbers for each piece of each purpose, whatever ranks draw from it."""

import torch


def mixed(seed: int, piece: int, *, purpose: int) -> int:
    """One seed for each piece of each purpose."""
    return (seed * 0x9E3779B97F4A7C15 + piece * 0xBF58476D1CE4E5B9 + purpose * 0x94D049BB133111EB) % (1 << 63)


def generator(seed: int, piece: int, *, purpose: int) -> torch.Generator:
    """On the CPU, seeded so."""
    return torch.Generator().manual_seed(mixed(seed, piece, purpose=purpose))
