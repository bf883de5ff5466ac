"""Predicted against counted: the formulas of a shape held against the ledger of a model that ran, to the unit."""

from collections import Counter
from collections.abc import Iterable

from phantom_parallel.cost.ledger import Ledger
from phantom_parallel.cost.terms import Shape

Key = tuple[str | int, ...]


def differences(shape: Shape, ledger: Ledger, *, native: bool, root: str = "FFN") -> list[str]:
    """Where formulas and ledger differ, each line naming the term; empty where they agree.

    Products are compared by phase, layer and size, those of a fused kernel by their sum; exchanges by phase, op, ranks,
    their distance and bytes. ``native``: whether the ranks exchange by all-gather and reduce-scatter, and not by
    all-to-all. ``root`` is the class of the model.
    """
    return [
        *_compare("product", _predicted_products(shape, root), _counted_products(ledger, shape, root)),
        *_compare_fused(shape, ledger, root),
        *_compare("exchange", _predicted_exchanges(shape, native), _counted_exchanges(ledger)),
    ]


def _predicted_products(shape: Shape, root: str) -> list[tuple[Key, str]]:
    return [
        (
            _product_key(p.phase, _named(f"{root}.{layer.name}", shape), p.batch, p.rows, p.inner, p.columns),
            f"{p.term} of {layer.name}",
        )
        for layer in shape.costs
        for p in layer.products
        if not layer.fused
    ]


def _counted_products(ledger: Ledger, shape: Shape, root: str) -> Counter[Key]:
    counted: Counter[Key] = Counter()
    parts = {f"{root}.{layer.name}" for layer in shape.costs}
    for e, count in ledger.products.items():
        if e.batch:
            module = _named(_part_of(e.module, parts), shape)
            counted[_product_key(e.phase, module, e.batch, e.rows, e.inner, e.columns)] += count
    return counted


def _named(module: str, shape: Shape) -> str:
    """The module, or nothing where parts of a batch take turns: their work runs outside of modules."""
    return module if shape.interleave == 1 else "the model"


def _part_of(module: str, parts: set[str]) -> str:
    """The part that a module is, or is within; a module in no part is left as it is."""
    name = module
    while name and name not in parts:
        name = name.rpartition(".")[0]
    return name or module


def _compare_fused(shape: Shape, ledger: Ledger, root: str) -> list[str]:
    predicted = Counter[Key]()
    for layer in shape.costs:
        for p in layer.products if layer.fused else ():
            predicted[(p.phase, _named(f"{root}.{layer.name}", shape))] += p.flops
    counted = Counter[Key]()
    for e, count in ledger.products.items():
        if not e.batch:
            counted[(e.phase, _named(e.module, shape))] += count * e.flops
    return [
        f"products of {module} {phase}: predicted {predicted[phase, module]} FLOPs, counted {counted[phase, module]}"
        for phase, module in predicted | counted
        if predicted[phase, module] != counted[phase, module]
    ]


def _product_key(phase: str, module: str, batch: int, rows: int, inner: int, columns: int) -> Key:
    """A product and its transpose are the same work."""
    return phase, module, batch, inner, min(rows, columns), max(rows, columns)


def _predicted_exchanges(shape: Shape, native: bool) -> list[tuple[Key, str]]:
    predicted: list[tuple[Key, str]] = []
    for e in shape.exchanges:
        built = not native and e.op in ("all_gather", "reduce_scatter") and not e.by_torch
        op = "all_to_all" if built else e.op
        predicted.append(((e.phase, op, e.ranks, e.stride, e.moved_bytes(shape.word_bytes)), e.term))
    return predicted


def _counted_exchanges(ledger: Ledger) -> Counter[Key]:
    counted: Counter[Key] = Counter()
    for e, count in ledger.collectives.items():
        counted[(e.phase, e.op, e.ranks, e.stride, e.moved)] += count
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
