"""Figures of the machine beside time: peak memory, energy, and which machine it is."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
import platform
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

DEVICE_PEAK, PROCESS_PEAK = "device peak", "process peak RSS"


@dataclass(frozen=True)
class Memory:
    """bytes: the peak, None where it cannot be told. what: of what, DEVICE_PEAK (allocated through JAX) or PROCESS_PEAK."""

    bytes: int | None
    what: str


class PeakMemory:
    """The peak since `restart`, of the device where it keeps statistics and of this process otherwise.

    A device's peak cannot be set back. One that did not rise since `restart` belongs to something earlier, and what came
    after is known only to have stayed below: that is None, not a number.
    """

    def __init__(self, device: jax.Device):  # pyright: ignore[reportInvalidTypeForm]
        self._device = device
        self.what = PROCESS_PEAK if device.memory_stats() is None else DEVICE_PEAK
        self.restart()

    def restart(self) -> None:
        fresh = self.what == PROCESS_PEAK and _forget_peak()
        self._before = -1 if fresh else self._now()

    def read(self) -> Memory:
        now = self._now()
        return Memory(now if now > self._before else None, self.what)

    def _now(self) -> int:
        return self._device.memory_stats()["peak_bytes_in_use"] if self.what == DEVICE_PEAK else process_peak()


def process_peak() -> int:
    """Bytes of this process's resident memory at its largest."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _forget_peak() -> bool:
    """Let Linux count the peak from what is resident now; False where it does not."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def energy_meter(device: jax.Device) -> Callable[[], float] | None:  # pyright: ignore[reportInvalidTypeForm]
    """Joules that the card has taken since its driver was loaded, by NVML; None where no NVML answers or where it is
    unclear which of several cards is meant."""
    if device.platform != "gpu":
        return None
    try:
        # By name: an installation need not have it, and nothing else here uses it.
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        handle = _card(nvml, device)
        if handle is None:
            return None
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError:
        return None
    return lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000  # it counts millijoules


def _card(nvml: Any, device: jax.Device) -> Any:  # pyright: ignore[reportInvalidTypeForm]
    """NVML counts the cards by bus, CUDA by speed and only the visible ones: clear with one card, a UUID, or by bus."""
    if nvml.nvmlDeviceGetCount() == 1:
        return nvml.nvmlDeviceGetHandleByIndex(0)
    visible = [v.strip() for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v.strip()]
    name = visible[device.local_hardware_id] if device.local_hardware_id < len(visible) else None
    if name and name.startswith("GPU-"):
        return nvml.nvmlDeviceGetHandleByUUID(name)
    if os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return None
    return nvml.nvmlDeviceGetHandleByIndex(device.local_hardware_id if name is None else int(name))


def versions() -> dict[str, str]:
    """Versions that a measurement depends on beside its settings. source: sha256 of the engine's sources, which change more often
    than a version does."""
    device = jax.devices()[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "ninfer_jax": importlib.metadata.version("ninfer-jax"),
        "source": _source(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "python": platform.python_version(),
        "backend": device.client.platform_version.splitlines()[0],
        "device": device.device_kind if device.platform != "cpu" else f"{_cpu_name()}, {cores} cores",
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine() or "cpu")


def _source() -> str:
    """Digest of every package the engine is made of, this one and the command line left out."""
    digest = hashlib.sha256()
    for package in ("ninfer_jax", "pallas_kernels"):
        (root,) = {Path(p) for p in importlib.import_module(package).__path__}
        files = (
            f
            for f in root.rglob("*")
            if f.suffix in (".py", ".json") and f.relative_to(root).parts[0] not in ("bench", "cli", "tiny")
        )
        for file in sorted(files):
            digest.update(f"{package}/{file.relative_to(root).as_posix()}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def fingerprint(model: Path) -> str:
    """Recognises a model directory without reading its weights: of its configuration, and all files' names and sizes."""
    digest = hashlib.sha256((model / "config.json").read_bytes())
    for file in sorted(p for p in model.iterdir() if p.is_file()):
        digest.update(f"{file.name} {file.stat().st_size}\0".encode())
    return digest.hexdigest()[:12]
