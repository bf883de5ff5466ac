"""The GPUs of a host that this process can use. Only their energy belongs to it."""

import os
from typing import Any

import torch


def visible_uuids() -> set[str] | None:
    """Return the UUIDs (``GPU-...``, as in NVML) of the CUDA devices that torch sees; None if torch has no CUDA."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    return {f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(torch.cuda.device_count())}


def visible_bdfs() -> set[str] | None:
    """Return the PCI addresses (``0000:c1:00``) of the ROCm devices that torch sees; None if torch has no ROCm."""
    if not torch.cuda.is_available() or torch.version.hip is None:
        return None
    found: list[Any] = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}" for p in found}


def physical_index(index: int) -> str:
    """Return the identifier that the host has for GPU ``index`` of this process.

    Ranks that each see a single GPU all call it GPU 0, although these are different devices.
    """
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        listed = [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]
        if index < len(listed):
            return listed[index]
    return str(index)
