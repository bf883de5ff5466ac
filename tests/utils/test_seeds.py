"""Random streams are reproducible, and independent for each seed, piece and purpose."""

import itertools

import torch

from phantom_parallel.utils.seeds import derive_seed, generator


def test_a_stream_depends_on_its_seed_piece_and_purpose_only():
    first, again = (torch.rand(4, generator=generator(3, 5, purpose=1)) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(first, again)
    seeds = {
        derive_seed(seed, piece, purpose=purpose) for seed, piece, purpose in itertools.product(range(8), repeat=3)
    }
    assert len(seeds) == 8**3
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert 0 <= derive_seed(1 << 80, 1 << 80, purpose=7) < 1 << 63
