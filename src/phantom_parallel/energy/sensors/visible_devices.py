"""The GPUs whose energy belongs to a rank, or to this process."""

import os
from typing import Any

import torch


def visible_uuids(device: torch.device | None = None) -> set[str] | None:
    """Return the UUIDs (``GPU-...``, as in NVML) of a rank's CUDA device.

    Args:
        device: the rank's device. Default: None, every device that torch sees, or None if torch has no CUDA.
    """
    properties = _properties(device, rocm=False)
    return None if properties is None else {f"GPU-{gpu.uuid}" for gpu in properties}


def visible_bdfs(device: torch.device | None = None) -> set[str] | None:
    """Return the PCI addresses (``0000:c1:00``) of a rank's ROCm device. Like :func:`visible_uuids`."""
    properties = _properties(device, rocm=True)
    if properties is None:
        return None
    return {f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}" for gpu in properties}


def _properties(device: torch.device | None, rocm: bool) -> list[Any] | None:
    available = torch.cuda.is_available() and (torch.version.hip is not None) == rocm
    if device is None:
        return [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if available else None
    return [torch.cuda.get_device_properties(device)] if available and device.type == "cuda" else []


def physical_index(index: int) -> str:
    """Return the identifier that the host has for GPU ``index`` of this process.

    Ranks that each see a single GPU all call it GPU 0, although these are different devices.
    """
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        listed = [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]
        if index < len(listed):
            return listed[index]
    return str(index)
