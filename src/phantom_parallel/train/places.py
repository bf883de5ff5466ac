"""Where a process stands among the ranks of a training."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phantom_parallel.train.config import LoopConfig


@dataclass(frozen=True)
class Places:
    """Where this process stands: the mesh of the ranks that share its model, and that of the copies of it; ``group``
    is all of them together, the process group by default.
    """

    tp: DeviceMesh | None = None
    dp: DeviceMesh | None = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, config: LoopConfig, device: torch.device) -> "Places":
        """In the process group of ``ranks`` times ``dp`` processes; those that share a model are neighbours."""
        if config.ranks * config.dp == 1:
            return cls(device=device)
        mesh = init_device_mesh(device.type, (config.dp, config.ranks), mesh_dim_names=("dp", "tp"))
        return cls(mesh["tp"] if config.ranks > 1 else None, mesh["dp"] if config.dp > 1 else None, device)

    @property
    def rank(self) -> int:
        return 0 if self.alone else dist.get_rank()

    @property
    def alone(self) -> bool:
        return self.tp is None and self.dp is None

    @property
    def tp_rank(self) -> int:
        """Which of the ranks that share this model."""
        return 0 if self.tp is None else self.tp.get_local_rank()

    @property
    def copy(self) -> int:
        """Which of the data-parallel copies."""
        return 0 if self.dp is None else self.dp.get_local_rank()
