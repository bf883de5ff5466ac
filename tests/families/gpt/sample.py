"""A small transformer that the tests share."""

import torch
from torch.distributed.device_mesh import init_device_mesh

from phantom_parallel import GPTConfig

SIZES = {"vocab": 24, "dim": 32, "layers": 2, "heads": 8, "kv_heads": 4, "hidden": 40, "context": 16}


def config_of(strategy: str = "phantom", **changes) -> GPTConfig:
    cut = {"phantom": {"blocks": 4, "ghosts": 3}, "lowrank": {"low_rank": 5}}.get(strategy, {})
    return GPTConfig(**(SIZES | cut | {"strategy": strategy} | changes))


def one_mesh():
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
