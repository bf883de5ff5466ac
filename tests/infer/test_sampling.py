"""Choosing tokens: against distributions worked out one token at a time, and frequencies of many draws."""

import math

import pytest
import torch

from phantom_parallel.infer.sampling import Sampler, Sampling, draw, probabilities


def by_hand(logits: list[float], temperature: float, top_k: int | None, top_p: float | None) -> list[float]:
    """Probabilities from the definition, in plain Python."""
    weights = [math.exp(value / temperature) for value in logits]
    order = sorted(range(len(logits)), key=lambda token: -weights[token])[:top_k]
    total = sum(weights[token] for token in order)
    chosen, reached = [], 0.0
    for token in order:
        chosen.append(token)
        reached += weights[token] / total
        if top_p is not None and reached >= top_p:
            break
    total = sum(weights[token] for token in chosen)
    return [weights[token] / total if token in chosen else 0.0 for token in range(len(logits))]


@pytest.mark.parametrize("temperature", [0.3, 2.5])
@pytest.mark.parametrize("top_k", [None, 3, 7])
@pytest.mark.parametrize("top_p", [None, 0.05, 0.9])
def test_probabilities_are_those_of_the_definition(temperature, top_k, top_p):
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    actual = probabilities(logits, Sampling(temperature, top_k, top_p))
    expected = [by_hand(row, temperature, top_k, top_p) for row in logits.double().tolist()]
    torch.testing.assert_close(actual / actual.sum(-1, keepdim=True), torch.tensor(expected, dtype=torch.float64))


def test_a_draw_is_where_the_sums_pass_it():
    chances = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]], dtype=torch.float64)
    drawn = {0.0: 1, 0.2499: 1, 0.25: 3, 0.7499: 3, 0.75: 4, 1 - 2**-53: 4}
    for number, token in drawn.items():
        assert draw(chances, torch.tensor([number], dtype=torch.float64)).tolist() == [token]
    scaled = 0.3 * chances  # sums that are not 1, and rounding
    for number, token in drawn.items():
        if number not in (0.25, 0.75):
            assert draw(scaled, torch.tensor([number], dtype=torch.float64)).tolist() == [token]


def test_greedy_takes_the_likeliest():
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(2))
    expected = [max(range(11), key=row.__getitem__) for row in logits.tolist()]
    assert Sampler(Sampling())(logits).tolist() == expected
    assert Sampler(Sampling(1e-300))(logits).tolist() == expected  # the limit, without overflow
    assert Sampler(Sampling(2.0, top_k=1))(logits).tolist() == expected


def test_the_seed_decides_and_rows_are_independent():
    logits = torch.zeros(4, 1000)

    def drawn(seed: int, steps: int = 3) -> list[list[int]]:
        sampler = Sampler(Sampling(1.0, seed=seed))
        return [sampler(logits).tolist() for _ in range(steps)]

    assert drawn(1) == drawn(1)
    assert drawn(1, 2) == drawn(1, 3)[:2]
    assert drawn(1) != drawn(2)
    assert len({token for step in drawn(1) for token in step}) > 8


def test_rounding_of_the_logits_changes_no_token():
    logits = torch.randn(2000, 50, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    shaken = logits + 1e-9 * torch.randn(2000, 50, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for sampling in (Sampling(1.0), Sampling(0.7, top_k=10), Sampling(1.2, top_p=0.9)):
        assert torch.equal(Sampler(sampling)(logits), Sampler(sampling)(shaken))
