"""Predictions for rows of a file, batch by batch, and a .npy file of them that appears whole or not at all."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from phantom_parallel.distributed.errors import Interrupted
from phantom_parallel.distributed.signals import StopRequest
from phantom_parallel.infer.inputs import Inputs
from phantom_parallel.infer.measure import arrived
from phantom_parallel.infer.predictor import RowModel, own_features, predictor_of, to_model
from phantom_parallel.ops.collectives import rank_group
from phantom_parallel.ops.features import gather_features
from phantom_parallel.utils.files import atomic_file


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
    """Rows of the file as this rank's model takes them."""
    return to_model(inputs.read(rows, own_features(model)), model)


@torch.inference_mode()
def predict(
    model: RowModel, inputs: Inputs, batch: int, *, out: Path | None = None, report: Callable[[int], None] | None = None
) -> None:
    """Run all rows through the model, on every rank of its mesh; rank 0 writes what comes out to ``out``.

    Predictions have the model's dtype, or float32 where numpy has none like it. ``report`` is told of rows that are
    done. Ctrl-C and SIGTERM end it after a batch, as `Interrupted`, with nothing left at ``out``.
    """
    writer = None
    if out is not None and rank_group(model.mesh).rank == 0:
        dtype = next(model.parameters()).dtype
        words = torch.empty(0, dtype=torch.float32 if dtype == torch.bfloat16 else dtype).numpy().dtype
        _, width = predictor_of(model.config).features(model.config)
        writer = NpyWriter(out, inputs.rows, width, words)
    with StopRequest() as stop, writer or nullcontext():
        for rows in inputs.batches(batch):
            whole = _on_first(arrived(model(read_rows(model, inputs, rows))), model)
            if writer is not None and whole is not None:
                writer.append((whole.float() if whole.dtype == torch.bfloat16 else whole).cpu())
            if report is not None:
                report(rows.stop)
            if _anybody(stop.requested, model.mesh) and rows.stop < inputs.rows:
                raise Interrupted(f"stopped at row {rows.stop} of {inputs.rows} as asked")


def _on_first(out: Tensor, model: RowModel) -> Tensor | None:
    """All features on rank 0, where they are cut."""
    if not model.shards_features:
        return out
    assert model.mesh is not None
    group, ranks = model.mesh.get_group(), rank_group(model.mesh)
    parts = [torch.empty_like(out) for _ in range(ranks.size)] if ranks.rank == 0 else None
    dist.gather(out.contiguous(), parts, group=group, group_dst=0)
    return None if parts is None else torch.cat(parts, -1)


def _anybody(asked: bool, mesh: DeviceMesh | None) -> bool:
    """Whether any rank was asked to stop: all of them do, or none."""
    if mesh is None:
        return asked
    flag = torch.tensor([float(asked)], device=mesh.device_type)
    dist.all_reduce(flag, group=mesh.get_group())
    return bool(flag.item())


@torch.inference_mode()
def largest_difference(one: RowModel, other: RowModel, x: Callable[[RowModel], Tensor]) -> tuple[float, float]:
    """The largest difference between two models' outputs on the same rows, and the largest output of the first.

    ``x`` gives a model's inputs. Where neither output is finite they agree. Every rank calls this.
    """
    a, b = (_whole(arrived(model(x(model))), model).double() for model in (one, other))
    apart = torch.where(a.isfinite() | b.isfinite(), (a - b).abs().nan_to_num(nan=torch.inf), 0.0)
    return float(apart.max()), float(a.nan_to_num(0.0, 0.0, 0.0).abs().max())


def _whole(out: Tensor, model: RowModel) -> Tensor:
    return gather_features(out, model.mesh) if model.shards_features else out
