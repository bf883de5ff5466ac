"""Shapes of FFNs, in short."""

from phantom_parallel.families.ffn.cost import FFNShape


def ffn(strategy: str, width: int, depth: int, **settings) -> FFNShape:
    return FFNShape.of(strategy=strategy, width=width, depth=depth, **settings)
