"""Hundreds of ranks with real numbers in one process."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def simulated_ranks(size: int) -> Iterator[tuple[LocalTensorMode, DeviceMesh]]:
    """LocalTensor mode over a fake process group of ``size`` ranks, with its mesh."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        with LocalTensorMode(size) as mode:
            yield mode, init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()
