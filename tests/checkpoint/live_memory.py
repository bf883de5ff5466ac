"""The memory of tensors that come into being within a block, counted apart from the code under test."""

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of new tensors on the CPU that are alive at once; ``peak`` is the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._tensors: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does with its local tensor comes here again
        given = {_pointer(leaf) for leaf in tree_leaves((args, kwargs)) if _has_memory(leaf)}
        out = func(*args, **(kwargs or {}))
        old = given - self._alive().keys()  # alive before the block: neither it nor its views are counted
        for leaf in tree_leaves(out):
            if _has_memory(leaf) and _pointer(leaf) not in old:
                self._tensors.append(weakref.ref(leaf))
        self._tensors = [ref for ref in self._tensors if ref() is not None]
        self.peak = max(self.peak, sum(self._alive().values()))
        return out

    def _alive(self) -> dict[int, int]:
        found = [tensor for ref in self._tensors if (tensor := ref()) is not None]
        return {_pointer(tensor): tensor.untyped_storage().nbytes() for tensor in found}


def _pointer(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _has_memory(leaf: object) -> bool:
    return type(leaf) in (torch.Tensor, torch.nn.Parameter)  # subclasses wrap such
