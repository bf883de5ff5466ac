"""Predicted against counted: the formulas of a shape held against the ledger of a model that ran, to the unit."""

from collections import Counter
from collections.abc import Iterable

from phantom_parallel.cost.formulas import FFNShape
from phantom_parallel.cost.ledger import Ledger

Key = tuple[str | int, ...]


def differences(shape: FFNShape, ledger: Ledger, *, native: bool, root: str = "FFN") -> list[str]:
    """Where formulas and ledger differ, each line naming the term; empty where they agree.

    Products are compared by phase, layer and size, exchanges by phase, op, ranks and bytes. ``native`` says whether the
    ranks exchange by all-gather and reduce-scatter or by all-to-all.
    """
    return [
        *_compare("product", _predicted_products(shape, root), _counted_products(ledger)),
        *_compare("exchange", _predicted_exchanges(shape, native), _counted_exchanges(ledger)),
    ]


def _predicted_products(shape: FFNShape, root: str) -> list[tuple[Key, str]]:
    return [
        (
            _product_key(p.phase, f"{root}.{layer.name}", p.batch, p.rows, p.inner, p.columns),
            f"{p.term} of {layer.name}",
        )
        for layer in shape.layers
        for p in layer.products
    ]


def _counted_products(ledger: Ledger) -> Counter[Key]:
    counted: Counter[Key] = Counter()
    for e, count in ledger.products.items():
        counted[_product_key(e.phase, e.module, e.batch, e.rows, e.inner, e.columns)] += count
    return counted


def _product_key(phase: str, module: str, batch: int, rows: int, inner: int, columns: int) -> Key:
    """A product and its transpose are the same work."""
    return phase, module, batch, inner, min(rows, columns), max(rows, columns)


def _predicted_exchanges(shape: FFNShape, native: bool) -> list[tuple[Key, str]]:
    predicted: list[tuple[Key, str]] = []
    for e in shape.exchanges:
        op = "all_to_all" if not native and e.op != "all_reduce" and shape.strategy != "megatron" else e.op
        predicted.append(((e.phase, op, e.ranks, e.moved_bytes(shape.word_bytes)), e.term))
    return predicted


def _counted_exchanges(ledger: Ledger) -> Counter[Key]:
    counted: Counter[Key] = Counter()
    for e, count in ledger.collectives.items():
        counted[(e.phase, e.op, e.ranks, e.moved)] += count
    return counted


def _compare(what: str, predicted: Iterable[tuple[Key, str]], counted: Counter[Key]) -> list[str]:
    terms: dict[Key, list[str]] = {}
    for key, term in predicted:
        terms.setdefault(key, []).append(term)
    lines = []
    for key, names in terms.items():
        if counted[key] != len(names):
            lines.append(f"{what} {' and '.join(names)} {key}: predicted {len(names)}, counted {counted[key]}")
    lines += [f"{what} {key}: counted {n}, in no formula" for key, n in counted.items() if key not in terms]
    return lines
