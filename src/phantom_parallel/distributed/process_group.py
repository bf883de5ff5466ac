"""The default process group of a rank and the rank's device."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phantom_parallel.distributed.errors import Interrupted


@contextmanager
def process_group(timeout: timedelta, **arguments: Any) -> Iterator[None]:
    """Initialize the default process group, and destroy it once every rank has left the block.

    Args:
        timeout: How long an exchange may take.
        arguments: For `torch.distributed.init_process_group`; by default the environment names the other ranks.

    Raises:
        OSError: If the other ranks cannot be joined.
    """
    try:
        dist.init_process_group(timeout=timeout, **arguments)
    except dist.DistError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise OSError(f"cannot join the other ranks at {address}: {str(error).splitlines()[0]}") from None
    try:
        yield
        dist.barrier()  # no rank leaves while another one still exchanges with it
    except Interrupted:
        dist.barrier()  # raised on every rank at the same boundary
        raise
    dist.destroy_process_group()


def select_device(local_ranks: int) -> torch.device:
    """Select this rank's device: an accelerator of its own if there are enough, otherwise the CPU.

    A task that Slurm has bound to one accelerator sees that one only.
    """
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or kind.type == "mps":  # mps has no float64 and no process groups
        return torch.device("cpu")
    visible = torch.accelerator.device_count()
    if visible < local_ranks and not (visible == 1 and "SLURM_STEP_ID" in os.environ):
        return torch.device("cpu")
    device = torch.device(kind.type, int(os.environ.get("LOCAL_RANK", 0)) % visible)
    torch.accelerator.set_device_index(device.index)
    return device
