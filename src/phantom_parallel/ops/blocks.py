"""Products of features cut into blocks with weights stacked by block: one batched matrix product for all blocks.

Rows carry features as (B, q m); a product wants them by block, (q, B, m). `cut` is a view; `join` copies, but for one
block, where it is a view too.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def cut(x: Tensor, blocks: int) -> Tensor:
    """(B, q m) -> (q, B, m), a view wherever x allows one."""
    return x.reshape(x.shape[0], blocks, x.shape[1] // blocks).transpose(0, 1)


def join(xs: Tensor) -> Tensor:
    """(q, B, m) -> (B, q m)."""
    return xs.squeeze(0) if xs.shape[0] == 1 else xs.transpose(0, 1).reshape(xs.shape[1], xs.shape[0] * xs.shape[2])


def times(xs: Tensor, weight: Tensor, add_to: Tensor | None = None) -> Tensor:
    """y_i = W_i x_i: (q, B, a) with W (q b, a) -> (q, B, b)."""
    return _bmm(xs, _by_block(weight, xs.shape[0]).transpose(1, 2), add_to)


def transposed_times(ds: Tensor, weight: Tensor, add_to: Tensor | None = None) -> Tensor:
    """y_i = W_i^T d_i: (q, B, b) with W (q b, a) -> (q, B, a)."""
    return _bmm(ds, _by_block(weight, ds.shape[0]), add_to)


def weight_grad(ds: Tensor, xs: Tensor) -> Tensor:
    """dW_i = d_i^T x_i: (q, B, b) with (q, B, a) -> (q b, a)."""
    return _bmm(ds.transpose(1, 2), xs).view(ds.shape[0] * ds.shape[2], xs.shape[2])


def _by_block(weight: Tensor, blocks: int) -> Tensor:
    return weight.view(blocks, weight.shape[0] // blocks, weight.shape[1])


def _bmm(a: Tensor, b: Tensor, add_to: Tensor | None = None) -> Tensor:
    if a.shape[0] == 1:
        return (torch.mm(a[0], b[0]) if add_to is None else add_product(add_to[0], a[0], b[0])).unsqueeze(0)
    return torch.bmm(a, b) if add_to is None else add_product(add_to, a, b)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """total + a b for one or a batch of products; into total where nothing else needs it."""
    product = torch.addmm if total.dim() == 2 else torch.baddbmm
    if (
        torch.compiler.is_compiling() or records_graph()
    ):  # a compiler sees to it by itself; a recorded graph needs the old total
        return product(total, a, b)
    return product(total, a, b, out=total)  # not the in-place method: torch's FlopCounterMode does not see that one


class _Forgets:
    """In place of autograd's context: keeps nothing."""

    needs_input_grad = (False,) * 16

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        pass


def apply(function: type[Function], *args: Any) -> Tensor:
    """``function.apply``; its forward alone where no gradient is recorded, which spares what autograd adds to it."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return function.apply(*args)
    return function.forward(_Forgets(), *args)


def records_graph() -> bool:
    """Whether a backward is itself to be differentiated (``create_graph=True``). A compiled one never is."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def cast_for_autocast(x: Tensor, *weights: Tensor | None) -> tuple[Any, ...]:
    """What autocast does to the arguments of a matrix product: all to its dtype, except float64."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return (x, *weights)
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple([t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in (x, *weights)])
