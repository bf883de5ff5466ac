"""Which of a host's GPUs this process may use: the others' joules are somebody else's."""

import os
from typing import Any

import torch


def visible_uuids() -> set[str] | None:
    """NVML's names (``GPU-...``) of the CUDA devices that torch sees; None where torch has no CUDA and cannot tell."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    return {f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(torch.cuda.device_count())}


def visible_bdfs() -> set[str] | None:
    """PCI addresses (``0000:c1:00``) of the ROCm devices that torch sees; None where torch has no ROCm."""
    if not torch.cuda.is_available() or torch.version.hip is None:
        return None
    found: list[Any] = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}" for p in found}


def physical_index(index: int) -> str:
    """The host's name for this process's GPU ``index``: ranks that each see only a GPU 0 of their own must not be taken
    for owners of the same one.
    """
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        listed = [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]
        if index < len(listed):
            return listed[index]
    return str(index)
