"""The wire codec: how rows of features, ghosts and gradients are written for the other ranks.

    full    x as it is, in the dtype of the products
    bf16    x rounded to bfloat16
    int8    s = max_c |x_c| / 127      one scale per row, float32
            q = round(x / s)           to nearest, ties to even: -127 ... 127
            x' = s q                   |x' - x| <= s / 2

A message has one row for each row of x: the values, the scale, and then the row's **exact** columns, such as a norm's
squares. Scale and exact columns are float32 or better, written bit for bit into as many columns of the message's dtype
as they fill. A row that has a value which is not finite arrives as NaN in int8.
"""

import torch
from torch import Tensor

from phantom_parallel.utils.strategies import SCALE_BYTES

LARGEST = 127
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # rows of zeros have a scale too


def encode(x: Tensor, wire: str, exact: Tensor | None = None) -> Tensor:
    """Write x (..., c) and its exact columns (..., e) as a message (..., c')."""
    parts = [x]
    if wire == "bf16":
        parts = [x.to(torch.bfloat16)]
    elif wire == "int8":
        x = x.to(precise(x.dtype))
        scale = (x.abs().amax(-1, keepdim=True) / LARGEST).to(torch.float32).clamp_min(_SMALLEST_SCALE)  # (..., 1)
        parts = [(x / scale).round_().to(torch.int8), scale.view(torch.int8)]
    if exact is not None:
        parts.append(exact.contiguous().view(parts[0].dtype))
    return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


def decode(message: Tensor, wire: str, columns: int, dtype: torch.dtype) -> Tensor:
    """Read x (..., columns) in ``dtype`` from a message."""
    x = message[..., :columns]
    if wire == "int8":
        scale = _as(message[..., columns : columns + SCALE_BYTES[wire]], torch.float32)  # (..., 1)
        return x.to(precise(dtype)).mul_(scale).to(dtype)
    return x.to(dtype)


def decode_exact(message: Tensor, wire: str, columns: int, dtype: torch.dtype) -> Tensor:
    """Read the exact columns (..., e), of ``dtype``, from a message with ``columns`` values in a row."""
    return _as(message[..., columns + SCALE_BYTES[wire] :], dtype)


def _as(columns: Tensor, dtype: torch.dtype) -> Tensor:
    """The bits of some columns as another dtype. A copy, since their offset in the message need not be aligned."""
    return columns.clone(memory_format=torch.contiguous_format).view(dtype)


def precise(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over features and of scales: float32 or better."""
    return torch.promote_types(dtype, torch.float32)
