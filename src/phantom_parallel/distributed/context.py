"""The parallel context: which ranks share this process's model, and which hold copies of it."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class ParallelContext:
    """Position of this process among the ranks of a job.

    Args:
        tp: Mesh of the ranks that share this process's model; None where it has the model to itself.
        dp: Mesh of the data-parallel copies; None where there is one.
        device: This rank's device.
        group: All ranks together; the default process group if None.
    """

    tp: DeviceMesh | None = None
    dp: DeviceMesh | None = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    group: dist.ProcessGroup | None = None

    @classmethod
    def create(cls, ranks: int, dp: int, device: torch.device) -> "ParallelContext":
        """Build the meshes in the default process group of ``ranks * dp`` processes; ranks that share a model are
        neighbours.
        """
        if ranks * dp == 1:
            return cls(device=device)
        mesh = init_device_mesh(device.type, (dp, ranks), mesh_dim_names=("dp", "tp"))
        set_timeout(mesh, timeout_of(dist.group.WORLD, device))
        return cls(mesh["tp"] if ranks > 1 else None, mesh["dp"] if dp > 1 else None, device)

    @property
    def rank(self) -> int:
        return 0 if self.single_process else dist.get_rank()

    @property
    def single_process(self) -> bool:
        return self.tp is None and self.dp is None

    @property
    def tp_rank(self) -> int:
        """Rank of this process among those that share its model."""
        return 0 if self.tp is None else self.tp.get_local_rank()

    @property
    def dp_rank(self) -> int:
        """Index of this process's data-parallel copy."""
        return 0 if self.dp is None else self.dp.get_local_rank()


def timeout_of(group: Any, device: torch.device) -> timedelta:
    """How long a collective of ``group`` may take on ``device``."""
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def set_timeout(mesh: DeviceMesh, timeout: timedelta) -> None:
    """Set how long collectives over a dimension of ``mesh`` may take. Torch gives half an hour to groups of some ranks,
    whatever the default process group has.
    """
    for group in mesh.get_all_groups():
        dist.distributed_c10d._set_pg_timeout(timeout, group)
