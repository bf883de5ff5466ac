"""Predictions for the rows of a file, batch by batch, written to a .npy file that appears whole or not at all."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from phantom_parallel.distributed.errors import Interrupted
from phantom_parallel.distributed.objects import all_gather_objects
from phantom_parallel.distributed.signals import StopRequest
from phantom_parallel.infer.inputs import Inputs
from phantom_parallel.infer.measure import wait_for
from phantom_parallel.infer.predictor import RowModel, own_features, predictor_of, to_model
from phantom_parallel.ops.collectives import rank_group
from phantom_parallel.ops.features import gather_features
from phantom_parallel.utils.files import atomic_file


class NonFinite(NamedTuple):
    """Number of predicted values that are NaN or infinite, and of the rows that hold them."""

    values: int
    rows: int


class NpyWriter:
    """Writes rows in order to a .npy file that appears once it is complete."""

    def __init__(self, path: Path, rows: int, width: int, dtype: Any) -> None:
        self._file_context = atomic_file(path)
        self._shape, self._dtype = (rows, width), np.dtype(dtype)
        self._written = 0

    def __enter__(self) -> "NpyWriter":
        self._file = self._file_context.__enter__()
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": self._shape}
        np.lib.format.write_array_header_1_0(self._file, header)
        return self

    def append(self, rows: Tensor) -> None:
        self._file.write(np.ascontiguousarray(rows.numpy(), dtype=self._dtype).tobytes())
        self._written += len(rows)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            assert self._written == self._shape[0]
        self._file_context.__exit__(kind, error, trace)


def read_rows(model: RowModel, inputs: Inputs, rows: slice) -> Tensor:
    """Read rows of the file as inputs of this rank's model."""
    return to_model(inputs.read(rows, own_features(model)), model)


@torch.inference_mode()
def predict(
    model: RowModel, inputs: Inputs, batch: int, *, out: Path | None = None, report: Callable[[int], None] | None = None
) -> NonFinite:
    """Run all rows through the model. Every rank of its mesh calls this, and rank 0 writes the predictions.

    Args:
        model: The model.
        inputs: The rows.
        batch: Number of rows of a forward pass.
        out: The .npy file to write. Predictions have the model's dtype, or float32 for bfloat16, which NumPy lacks.
        report: Called with the number of finished rows after each batch.

    Returns:
        The number of predictions that are not finite.

    Raises:
        Interrupted: After SIGINT or SIGTERM on any rank, at the end of a batch. Nothing is left at ``out``.
    """
    writer = None
    if out is not None and rank_group(model.mesh).rank == 0:
        dtype = next(model.parameters()).dtype
        words = torch.empty(0, dtype=torch.float32 if dtype == torch.bfloat16 else dtype).numpy().dtype
        _, width = predictor_of(model.config).features(model.config)
        writer = NpyWriter(out, inputs.rows, width, words)
    non_finite = torch.zeros(2, dtype=torch.int64)
    with StopRequest() as stop, writer or nullcontext():
        for rows in inputs.batches(batch):
            whole = _gather_on_rank_zero(wait_for(model(read_rows(model, inputs, rows))), model)
            if whole is not None:
                bad = ~whole.isfinite()
                non_finite += torch.stack([bad.sum(), bad.any(1).sum()]).cpu()
            if writer is not None and whole is not None:
                writer.append((whole.float() if whole.dtype == torch.bfloat16 else whole).cpu())
            if report is not None:
                report(rows.stop)
            if _on_any_rank(stop.requested, model.mesh) and rows.stop < inputs.rows:
                raise Interrupted(f"stopped at row {rows.stop} of {inputs.rows}")
    values, rows_with_them = all_gather_objects(non_finite.tolist(), model.mesh)[0]
    return NonFinite(values, rows_with_them)


def _gather_on_rank_zero(out: Tensor, model: RowModel) -> Tensor | None:
    """Return outputs with all features: on rank 0 if features are sharded, otherwise on every rank."""
    if not model.shards_features:
        return out
    assert model.mesh is not None
    group, ranks = model.mesh.get_group(), rank_group(model.mesh)
    parts = [torch.empty_like(out) for _ in range(ranks.size)] if ranks.rank == 0 else None
    dist.gather(out.contiguous(), parts, group=group, group_dst=0)
    return None if parts is None else torch.cat(parts, -1)


def _on_any_rank(requested: bool, mesh: DeviceMesh | None) -> bool:
    """Return whether any rank received a signal, so that all ranks stop together."""
    if mesh is None:
        return requested
    flag = torch.tensor([float(requested)], device=mesh.device_type)
    dist.all_reduce(flag, group=mesh.get_group())
    return bool(flag.item())


@torch.inference_mode()
def largest_difference(first: RowModel, second: RowModel, x: Callable[[RowModel], Tensor]) -> tuple[float, float]:
    """Return the largest difference between two models' outputs on the same rows, and the largest output of the first.

    ``x`` returns a model's inputs. Outputs that are not finite in both models count as equal. Every rank calls this.
    """
    a, b = (_whole(wait_for(model(x(model))), model).double() for model in (first, second))
    difference = torch.where(a.isfinite() | b.isfinite(), (a - b).abs().nan_to_num(nan=torch.inf), 0.0)
    return float(difference.max()), float(a.nan_to_num(0.0, 0.0, 0.0).abs().max())


def _whole(out: Tensor, model: RowModel) -> Tensor:
    return gather_features(out, model.mesh) if model.shards_features else out
