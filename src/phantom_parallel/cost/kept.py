"""The activations that a training step keeps for backward, counted by what autograd saves."""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phantom_parallel.cost.steps import TrainingStep


def kept_by(step: TrainingStep) -> int:
    """Run both passes of a step, and return the most bytes of activations that it keeps at a time.

    Each storage counts once, and no weights do, but for gathered weights that FSDP2 keeps from forward to backward. In
    a pipeline, what a stage receives into and outputs that wait for their gradients count as well.
    """
    kept = Kept((*step.model.parameters(), *step.constants))
    with ExitStack() as hooks:
        for module in _called(step.model):
            hooks.callback(module.register_forward_pre_hook(kept.uses_weights).remove)
        for module in step.recomputed:
            hooks.callback(module.register_forward_pre_hook(kept.enters).remove)
        if step.pipeline is not None:
            for buffer in step.pipeline.buffers(step.rows):
                kept.add(buffer)
            step.pipeline.on_output = kept.watch
            hooks.callback(setattr, step.pipeline, "on_output", None)
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            loss = step.loss()
        if step.pipeline is not None:
            return kept.peak
        total = kept.bytes + kept.gathered_bytes()
        loss.backward()
        return total


def _called(model: nn.Module) -> Iterator[nn.Module]:
    """Modules whose forward pass is run. A hook on one of the others would change how the model runs."""
    interleaved = getattr(model, "interleave", 1) > 1
    others = set(model.modules_in_turns()) if interleaved else set()  # type: ignore[operator]
    return (module for module in model.modules() if module not in others)


class Kept:
    """Storages that are kept, and the most bytes of them at a time.

    Args:
        weights: Tensors that are no activations.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = {storage._cdata: storage for storage in map(storage_of, weights)}
        self._own = set(self._weights)
        self._held: Counter[int] = Counter()
        self.bytes = self.peak = 0

    def add(self, tensor: Tensor) -> torch.UntypedStorage:
        """Count a tensor's storage until it is dropped as often as it was added."""
        storage = storage_of(tensor)
        self._held[storage._cdata] += 1
        if self._held[storage._cdata] == 1 and storage._cdata not in self._weights:
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)
        return storage

    def drop(self, storage: torch.UntypedStorage) -> None:
        self._held[storage._cdata] -= 1
        if not self._held[storage._cdata] and storage._cdata not in self._weights:
            self.bytes -= storage.nbytes()

    def watch(self, tensor: Tensor) -> None:
        """Count a tensor's storage for as long as the tensor exists."""
        weakref.finalize(tensor, self.drop, self.add(tensor)).atexit = False

    def pack(self, tensor: Tensor) -> "_Saved":
        return _Saved(tensor, self)

    @staticmethod
    def unpack(saved: "_Saved") -> Tensor:
        return saved.tensor

    def enters(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        """A hook for modules that are recomputed in backward: their first argument is kept without being saved."""
        self.watch(arguments[0])

    def uses_weights(self, module: nn.Module, arguments: Any) -> None:
        """A hook for all modules: FSDP2 gives them gathered weights while they run."""
        for parameter in module.parameters(recurse=False):
            storage = storage_of(parameter)
            self._weights[storage._cdata] = storage

    def gathered_bytes(self) -> int:
        """Bytes of gathered weights that were not freed."""
        return sum(storage.nbytes() for key, storage in self._weights.items() if key not in self._own)


class _Saved:
    """What autograd holds in place of a tensor, until backward has used it."""

    def __init__(self, tensor: Tensor, kept: Kept) -> None:
        self.tensor, self._kept = tensor, kept
        self._storage = kept.add(tensor)

    def __del__(self) -> None:
        self._kept.drop(self._storage)


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """The memory that a tensor lies in, of a DTensor this rank's."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
