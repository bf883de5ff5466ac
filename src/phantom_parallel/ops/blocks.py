"""Products of features that are split into blocks with weights stacked by block: one batched matrix product for all.

Rows carry features as (B, q m); a product needs them by block, (q, B, m). `split_blocks` is a view; `merge_blocks`
copies, except for a single block, where it is a view as well.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad


def split_blocks(x: Tensor, blocks: int) -> Tensor:
    """(B, q m) -> (q, B, m), a view wherever x allows one."""
    return x.reshape(x.shape[0], blocks, x.shape[1] // blocks).transpose(0, 1)


def merge_blocks(xs: Tensor) -> Tensor:
    """(q, B, m) -> (B, q m)."""
    return xs.squeeze(0) if xs.shape[0] == 1 else xs.transpose(0, 1).reshape(xs.shape[1], xs.shape[0] * xs.shape[2])


def unflatten_rows(z: Tensor, x: Tensor) -> Tensor:
    """(B, b) -> (..., b) for the rows of x (..., a): where a gradient is recorded not a view, of which FSDP2 warns."""
    view: Any = torch.ops.aten._unsafe_view.default if z.requires_grad else torch.Tensor.view
    return view(z, [*x.shape[:-1], z.shape[-1]])


def matmul_blocks(xs: Tensor, weight: Tensor, add_to: Tensor | None = None) -> Tensor:
    """y_i = W_i x_i: (q, B, a) with W (q b, a) -> (q, B, b)."""
    return _bmm(xs, _by_block(weight, xs.shape[0]).transpose(1, 2), add_to)


def matmul_blocks_t(ds: Tensor, weight: Tensor, add_to: Tensor | None = None) -> Tensor:
    """y_i = W_i^T d_i: (q, B, b) with W (q b, a) -> (q, B, a)."""
    return _bmm(ds, _by_block(weight, ds.shape[0]), add_to)


def weight_grad(ds: Tensor, xs: Tensor) -> Tensor:
    """dW_i = d_i^T x_i: (q, B, b) with (q, B, a) -> (q b, a)."""
    return _bmm(ds.transpose(1, 2), xs).view(ds.shape[0] * ds.shape[2], xs.shape[2])


def _by_block(weight: Tensor, blocks: int) -> Tensor:
    return weight.reshape(blocks, weight.shape[0] // blocks, weight.shape[1])


def _bmm(a: Tensor, b: Tensor, add_to: Tensor | None = None) -> Tensor:
    if a.shape[0] == 1:
        return (torch.mm(a[0], b[0]) if add_to is None else add_product(add_to[0], a[0], b[0])).unsqueeze(0)
    return torch.bmm(a, b) if add_to is None else add_product(add_to, a, b)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """total + a b for one product or a batch of them; in place where total is not needed again."""
    product = torch.addmm if total.dim() == 2 else torch.baddbmm
    # A compiler reuses memory by itself, a recorded graph needs the old total, and a transform has rules for neither.
    if torch.compiler.is_compiling() or is_creating_graph() or is_transformed() or is_batched(a):
        return product(total, a, b)
    return product(total, a, b, out=total)  # not the in-place method: torch's FlopCounterMode does not count that one


class _NoGradContext:
    """Stands in for autograd's context where no gradient is recorded: saves nothing."""

    needs_input_grad = (False,) * 16

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        pass


def apply_function(function: type[Function], *args: Any) -> Tensor:
    """``function.apply``; only its forward where no gradient is recorded, which avoids autograd's overhead."""
    refuse_transforms()
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return function.apply(*args)
    return function.forward(_NoGradContext(), *args)


def refuse_transforms() -> None:
    if is_transformed():
        raise RuntimeError("torch.func transforms and forward-mode derivatives are supported in one process only")


class OutputVersion:
    """Whether an output that backward needs was modified in place since, such as by ``nn.ReLU(inplace=True)``."""

    _probe: Tensor | None = None

    def watch(self, z: Tensor) -> None:
        if z.requires_grad and type(z) is Tensor:
            self._probe = z.detach()
            self._probe.data = z.new_empty(0)  # shares the version counter, and not the memory
            self._version = z._version

    @property
    def is_modified(self) -> bool:
        return self._probe is not None and self._probe._version != self._version


def is_creating_graph() -> bool:
    """Whether a backward is itself recorded (``create_graph=True``). A compiled backward never is."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` or forward-mode differentiation is active, which cannot see through an
    ``autograd.Function`` that saves intermediate results: operators of one process then compose functions of torch.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_batched(d: Tensor) -> bool:
    """Whether a gradient is a batch of gradients, as of ``torch.autograd.grad`` with ``is_grads_batched=True``."""
    return not torch.compiler.is_compiling() and torch._C._functorch.is_legacy_batchedtensor(d)


def check_operands(x: Tensor, weight: Tensor) -> None:
    """Raise ValueError if a dtype is complex, or if x and the weight are on different devices."""
    check_real(x.dtype if x.is_complex() else weight.dtype)
    if weight.device != x.device:
        raise ValueError(f"the input is on {x.device} and the weights are on {weight.device}: move one to the other")


def check_real(dtype: torch.dtype) -> None:
    """Raise ValueError if a dtype is complex: the gradients here do not conjugate."""
    if dtype.is_complex:
        raise ValueError(f"complex dtypes are not supported, got {dtype}: use real and imaginary parts as features")


def cast_for_autocast(x: Tensor, *weights: Tensor | None) -> tuple[Any, ...]:
    """Cast the operands of a matrix product as autocast does: to its dtype, except float64."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return (x, *weights)
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple([t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in (x, *weights)])
