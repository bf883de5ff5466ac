"""Rotary positions and the cache, by themselves."""

import pytest
import torch

from phantom_parallel.nn.attention import Cache, rotary_tables, rotate


def rates(head_dim: int, base: float) -> torch.Tensor:
    return base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)


def test_rotation_is_multiplication_by_a_complex_number():
    x = torch.randn(2, 7, 3, 2, 8, dtype=torch.float64)
    cos, sin = rotary_tables(7, rates(8, 100.0), dtype=torch.float64)
    pairs = torch.complex(x[..., :4], x[..., 4:])
    for position in range(7):
        for pair in range(4):
            angle = torch.tensor(position * 100.0 ** (-pair / 4), dtype=torch.float64)
            pairs[:, position, :, :, pair] *= torch.complex(angle.cos(), angle.sin())
    torch.testing.assert_close(rotate(x, cos, sin), torch.cat([pairs.real, pairs.imag], -1), rtol=1e-12, atol=1e-12)


def test_scores_depend_on_distance_only():
    cos, sin = rotary_tables(50, rates(16, 10000.0), dtype=torch.float64)
    q, k = (torch.randn(1, 1, 1, 1, 16, dtype=torch.float64) for _ in range(2))

    def score(at: int, of: int) -> torch.Tensor:
        return (rotate(q, cos[at : at + 1], sin[at : at + 1]) * rotate(k, cos[of : of + 1], sin[of : of + 1])).sum()

    torch.testing.assert_close(score(9, 4), score(45, 40), rtol=1e-12, atol=1e-12)
    assert abs(float(score(9, 4) - score(9, 5))) > 1e-6


def test_a_rotation_keeps_the_dtype_and_tables_made_for_inference_serve_training():
    with torch.inference_mode():
        cos, sin = rotary_tables(3, rates(4, 10.0))
    x = torch.randn(1, 3, 1, 1, 4, dtype=torch.bfloat16, requires_grad=True)
    turned = rotate(x, cos, sin)
    turned.sum().backward()
    assert turned.dtype == x.grad.dtype == torch.bfloat16


def test_a_cache_gives_back_all_that_it_was_given():
    cache = Cache(torch.zeros(2, 1, 3, 5, 4), torch.zeros(2, 1, 3, 5, 4))
    k, v = torch.randn(2, 1, 3, 4, 4)[0], torch.randn(1, 3, 4, 4)
    cache.append(1, k[:, :, :3], v[:, :, :3])
    cache.position = 3
    keys, values = cache.append(1, k[:, :, 3:], v[:, :, 3:])
    assert torch.equal(keys, k)
    assert torch.equal(values, v)
    assert not cache.keys[0].any()
    with pytest.raises(ValueError, match="room for 5 positions and holds 3, got 3 more"):
        cache.check_room(1, 3)
