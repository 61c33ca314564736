"""A limit of a card's power, through NVML, which only some installations have and only some users may set."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any


def limit_power(watts: int, environment: Mapping[str, str] = os.environ) -> None:
    """Set the limit of the first visible card; it stays after this process. ValueError, one line, where that cannot be done."""
    try:
        # By name: an installation need not have it.
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        raise ValueError(f"power_watts {watts}: nvidia-ml-py is missing: pip install 'ninfer-jax[nvml]'") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise ValueError(f"power_watts {watts}: {error}: no NVIDIA driver answers, leave the key out here") from None
    try:
        card = _first(nvml, environment)
        low, high = (n // 1000 for n in nvml.nvmlDeviceGetPowerManagementLimitConstraints(card))
        if not low <= watts <= high:
            raise ValueError(f"power_watts is {watts}, this card takes from {low} to {high}")
        if nvml.nvmlDeviceGetPowerManagementLimit(card) != watts * 1000:
            nvml.nvmlDeviceSetPowerManagementLimit(card, watts * 1000)
    except nvml.NVMLError as error:
        raise ValueError(f"power_watts {watts}: {error} (setting it takes root: run `sudo nvidia-smi -pl {watts}` once)") from None


def _first(nvml: Any, environment: Mapping[str, str]) -> Any:
    """NVML counts the cards by bus, CUDA by speed and only the visible ones: clear with one card, a UUID, or by bus."""
    visible = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if visible and visible[0].startswith("GPU-"):
        return nvml.nvmlDeviceGetHandleByUUID(visible[0])
    if nvml.nvmlDeviceGetCount() == 1:
        return nvml.nvmlDeviceGetHandleByIndex(0)
    if environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise ValueError("power_watts: which of several cards? set CUDA_DEVICE_ORDER=PCI_BUS_ID, or CUDA_VISIBLE_DEVICES to a UUID")
    return nvml.nvmlDeviceGetHandleByIndex(int(visible[0]) if visible and visible[0].isdecimal() else 0)
