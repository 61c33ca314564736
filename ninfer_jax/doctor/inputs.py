"""All that the doctor looks at, read from the machine as it is: texts and numbers that are judged elsewhere."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pallas_kernels import kept_files

PACKAGES = (
    "ninfer-jax",
    "jax",
    "jaxlib",
    "flax",
    "numpy",
    "llvmlite",
    "tokenizers",
    "llguidance",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
)
# What is asked of each card, in this order (`nvidia-smi --help-query-gpu`).
CARD_FIELDS = (
    "index",
    "name",
    "uuid",
    "driver_version",
    "memory.total",
    "memory.used",
    "memory.free",
    "display_active",
    "persistence_mode",
    "power.limit",
    "power.default_limit",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "temperature.gpu",
)
PROCESS_FIELDS = ("gpu_uuid", "pid", "used_memory")
_SETTINGS = (
    "JAX_PLATFORMS",
    "XLA_FLAGS",
    "CUDA_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
    "NINFER_JAX_PROGRAM_CACHE",
    "JAX_COMPILATION_CACHE_DIR",
)
_PROBE_BYTES = 64 << 20


@dataclass(frozen=True)
class Folder:
    """A folder of kept files. uid, mode: of its `stat`; bytes: of the files in it."""

    name: str
    path: Path
    uid: int
    mode: int
    bytes: int


@dataclass(frozen=True)
class Inputs:
    """cards, processes: what nvidia-smi printed for `CARD_FIELDS` and `PROCESS_FIELDS`, None where there is no such command;
    smi_error: what it said instead of an answer. environment: the variables that decide about devices. read_rate: bytes a second
    from the disk of the cache, None where it could not be measured."""

    versions: Mapping[str, str]
    python: str
    system: str
    kernel: str
    cpuinfo: str
    meminfo: str
    cores: int
    uid: int
    environment: Mapping[str, str]
    cards: str | None = None
    processes: str | None = None
    smi_error: str = ""
    wsl: bool = False
    folders: tuple[Folder, ...] = ()
    free_disk: int | None = None
    read_rate: float | None = None
    available: int | None = None
    kernels_error: str = ""
    checkout: bool = False


def read(measure_disk: bool = True) -> Inputs:
    """This machine, as it describes itself. Starts no JAX; writes and removes 64 MiB beside the cache if `measure_disk`."""
    kernel = _text("/proc/version") or platform.version()
    cards, error = _smi("gpu", CARD_FIELDS)
    place = _existing(kept_files.base())
    return Inputs(
        versions=_versions(),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        kernel=platform.release(),
        cpuinfo=_text("/proc/cpuinfo"),
        meminfo=_text("/proc/meminfo"),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        uid=os.getuid(),
        environment={name: os.environ[name] for name in _SETTINGS if name in os.environ},
        cards=cards,
        processes=_smi("compute-apps", PROCESS_FIELDS)[0] if cards else None,
        smi_error=error,
        wsl="microsoft" in kernel.lower(),
        folders=tuple(_folders(kept_files.base())),
        free_disk=_free(place),
        read_rate=_read_rate(place) if measure_disk else None,
        available=_available(),
        kernels_error=_kernels_error(),
        checkout=(Path(__file__).parents[2] / "benchmarks" / "device_check.py").is_file(),
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _smi(what: str, fields: tuple[str, ...]) -> tuple[str | None, str]:
    """The output of nvidia-smi, and what it says where it fails."""
    command = shutil.which("nvidia-smi") or (
        "/usr/lib/wsl/lib/nvidia-smi" if Path("/usr/lib/wsl/lib/nvidia-smi").exists() else None
    )
    if command is None:
        return None, ""
    try:
        done = subprocess.run(
            [command, f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", type(error).__name__
    if done.returncode:
        return "", " ".join((done.stdout + done.stderr).split())
    return done.stdout, ""


def _folders(base: Path) -> list[Folder]:
    found = []
    for path in (base, *sorted(p for p in base.iterdir() if p.is_dir())) if base.is_dir() else ():
        with contextlib.suppress(OSError):
            info = path.stat()
            size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
            found.append(Folder("all" if path == base else path.name, path, info.st_uid, info.st_mode & 0o7777, size))
    return found


def _existing(path: Path) -> Path:
    return next(p for p in (path, *path.absolute().parents) if p.exists())


def _free(place: Path) -> int | None:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(place).free
    return None


def _read_rate(place: Path) -> float | None:
    """Bytes a second of a file that is not in the system's cache of files; None where nothing can be written."""
    try:
        with tempfile.NamedTemporaryFile(dir=place) as file:
            file.write(os.urandom(1 << 20) * (_PROBE_BYTES >> 20))
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            start = time.perf_counter()
            while file.read(1 << 20):
                pass
            return _PROBE_BYTES / (time.perf_counter() - start)
    except (OSError, AttributeError):
        return None


def _available() -> int | None:
    from ninfer_jax.engine.memory import host_bytes

    return host_bytes()


def _kernels_error() -> str:
    from pallas_kernels import cpu

    try:
        cpu.check()
    except cpu.KernelError as error:
        return str(error)
    return ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except OSError:
        return ""
