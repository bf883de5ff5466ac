"""The device type ``simulated`` as torch loads it in processes with the variables of ``accelerator.environment``."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch

NAME = "simulated"


def load() -> None:
    """Register the device with torch, which calls this at the end of its import."""
    torch.utils.rename_privateuse1_backend(NAME)
    torch.ops.load_library(os.environ["SIMULATED_LIBRARY"])
    torch._register_device_module(NAME, _device_module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    from torch.distributed.distributed_c10d import Backend

    Backend.register_backend("simulated_ccl", _make_group, devices=[NAME])
    Backend.default_device_backend_map[NAME] = "simulated_ccl"


def _device_module() -> Any:
    module: Any = ModuleType(f"torch.{NAME}")
    operators = torch.ops.simulated
    module.is_available = module.is_initialized = module.is_bf16_supported = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.device_count, module.current_device = operators.device_count, operators.current_device
    module.set_device = lambda device: operators.set_device(torch.device(device).index or 0)
    module.synchronize = lambda device=None: torch.accelerator.synchronize()
    module.manual_seed = module.manual_seed_all = lambda seed: operators.manual_seed(seed % (1 << 63))
    module.get_device_name = lambda device=None: "Simulated Accelerator"
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: None
    module.current_stream = lambda device=None: torch.Stream(device=NAME)
    module.stream = lambda stream: nullcontext()
    module.Stream, module.Event = torch.Stream, torch.Event
    return module


def _make_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A delayed group for tensors of the device. Those of the host go to gloo at once."""
    import torch.distributed as dist
    from torch.utils._pytree import tree_leaves, tree_map_only

    from tests.device.delayed import COLLECTIVES, DelayedGroup

    as_cpu = torch.ops.simulated.as_cpu

    class DeviceGroup(DelayedGroup):
        @property
        def _device_types(self) -> list[torch.device]:
            return [torch.device(NAME), torch.device("cpu")]

    def on_device(name: str) -> Callable[..., Any]:
        def collective(self: Any, *args: Any, **options: Any) -> Any:
            if any(isinstance(leaf, torch.Tensor) and leaf.device.type == NAME for leaf in tree_leaves(args)):
                return getattr(DelayedGroup, name)(self, *tree_map_only(torch.Tensor, as_cpu, args), **options)
            work = getattr(host, name)(*args, **options)
            work.wait()
            return work

        return collective

    for name in COLLECTIVES:
        setattr(DeviceGroup, name, on_device(name))
    host = DelayedGroup(dist.PrefixStore("host", store), rank, size, timeout)
    return DeviceGroup(dist.PrefixStore("device", store), rank, size, timeout)
