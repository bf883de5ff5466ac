"""Parts of a batch that take turns, so that the exchanges of one overlap with the products of the others.

A part is a generator that yields wherever an exchange has begun whose result it needs next. While it travels, the other
parts compute up to the same place. Gradients follow in the opposite order, by autograd's own rule: of what is ready, it
runs the backward of what ran last.
"""

from collections.abc import Generator
from typing import Any

from torch import Tensor

Part = Generator[None, None, Tensor]


def take_turns(parts: list[Part]) -> list[Tensor]:
    """Run all parts to their ends, each up to its next exchange in turn, and return their results."""
    results: dict[int, Tensor] = {}
    while len(results) < len(parts):
        for index, part in enumerate(parts):
            if index not in results:
                try:
                    next(part)
                except StopIteration as finished:
                    results[index] = finished.value
    return [results[index] for index in range(len(parts))]


def apply_map(module: Any, x: Tensor) -> Part:
    """A linear map, with a turn for the others while its exchange travels.

    torch's own styles start their exchanges by themselves, and wait for them where a result is first used.
    """
    if not hasattr(module, "begin"):
        z = module(x)
        yield
        return z
    begun = module.begin(x)
    yield
    return module.end(begun)
