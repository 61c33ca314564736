"""The origin of compiled programs, beside their shapes: their code, block sizes, compiler, machine.

Equal shapes alone never pass for equal programs: one that older code was compiled to would load, run, and answer wrongly.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform as machine
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import cpu, deviceless, driver, tuned

# The folders whose code is traced, or says with what constants: every file of theirs but those below.
SOURCES = (
    "ninfer_jax/config",
    "ninfer_jax/decoding",
    "ninfer_jax/model",
    "ninfer_jax/programs",
    "ninfer_jax/state",
    "pallas_kernels",
)
# What handles programs, looks at them or tries kernels alone. Tuned sizes have a field of their own.
LEFT_OUT = re.compile(
    r"ninfer_jax/config/presets\.py|ninfer_jax/programs/(card|compilations|executables|kept|kernel_files|plan|provenance|setup)\.py"
    r"|pallas_kernels/((lab|targets|tuned)/.*|(.*/)?((triton|cpu)_)?cases\.py|(deviceless|driver|inspect)\.py)"
)
# Instruction sets that compilers choose by; a processor's other flags come and go with kernels and hypervisors.
_VECTORS = re.compile(r"sse4|avx|amx|fma|f16c|bmi|asimd|sve|i8mm|bf16")
_WIDEST = re.compile(r"avx512|amx|avx10")


def made_of(target: str, cuda: int = deviceless.CUDA, kernels: str = "xla") -> dict[str, Any]:
    """The ingredients of a program that is compiled for `target` here and now, as JSON, without its configuration.
    cuda: whose plugin compiles it, if for a card; kernels: whose a CPU runs, as `Setup` has it."""
    sizes = {op: _digest(json.dumps(found, sort_keys=True)) for op, found in tuned.sizes(target).items()}
    found = {
        "target": target,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "code": code_digest(),
        "tuned": sizes,
    }
    if target != "cpu":
        return found | {"plugin": plugin(cuda)}
    llvm = {"llvmlite": f"{importlib.metadata.version('llvmlite')}, LLVM {cpu.here().llvm}"} if kernels == "cpu" else {}
    return found | {"processor": machine.machine()} | llvm


def needs(target: str, kernels: str = "xla") -> dict[str, Any]:
    """The least that the machine which runs it must have: a driver for this CUDA, or these instruction sets, those that
    kernels of a CPU were compiled for by LLVM's names."""
    if target != "cpu":
        return {"cuda": deviceless.CUDA}
    return {"instructions": instructions()} | ({"kernels": cpu.here().instructions()} if kernels == "cpu" else {})


def refusal(written: Mapping[str, Any], device: jax.Device) -> str:  # pyright: ignore[reportInvalidTypeForm]
    """Why programs that need `written` cannot run here, and what to do; "" if they can. TypeError or KeyError for a damaged
    manifest."""
    if device.platform == "cpu":
        missing = set(written["instructions"]) - set(instructions())
        if kernels := set(written.get("kernels", ())):
            missing |= kernels - set(cpu.here().instructions())
        names = ", ".join(sorted(missing))
        return f"this processor has no {names}, for which they were compiled; compile them on it" if missing else ""
    here, wanted = driver.cuda_version(), int(written["cuda"])
    if here is None or here[0] >= wanted:
        return ""
    return f"the driver serves CUDA {here[0]}.{here[1]}, they need CUDA {wanted}: update the driver (`docs/setup.md`)"


def differences(written: Mapping[str, Any], here: Mapping[str, Any], name: str = "") -> list[str]:
    """One piece of text for each field of `here` that is not the same in `written`, nested ones by their path."""
    found = []
    for field in [*here, *(f for f in written if f not in here)] if name else list(here):
        path, then, now = f"{name}{field}", written.get(field), here.get(field)
        if isinstance(then, dict) and isinstance(now, dict):
            found += differences(then, now, f"{path}.")
        elif then != now:
            found.append(f"{path} is {_short(then)} in the programs, {_short(now)} here")
    return found


@functools.cache
def code_digest() -> str:
    """Digest of the sources that programs are made of."""
    return _digest_of(None)


def _digest_of(root: Path | None) -> str:
    """Digest of the sources under `root`, a checkout, or of those that are imported here."""
    sha = hashlib.sha256()
    for name, file in sorted(_sources(root)):
        # Line ends are the checkout's, not the code's.
        sha.update(f"{name}\n".encode() + file.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return sha.hexdigest()[:16]


def _sources(root: Path | None) -> Iterator[tuple[str, Path]]:
    for folder in SOURCES:
        top, _, below = folder.partition("/")
        base = root / top if root else _folder(top)
        for file in (base / below).rglob("*.py"):
            name = f"{top}/{file.relative_to(base).as_posix()}"
            if not LEFT_OUT.fullmatch(name):
                yield name, file


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None  # this very code is in one of them
    return Path(spec.origin).parent


def plugin(cuda: int) -> str:
    """Name and version of JAX's plugin for this CUDA."""
    wheel = f"jax-cuda{cuda}-pjrt"
    try:
        return f"{wheel} {importlib.metadata.version(wheel)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{wheel} (not installed as a wheel)"


def running_cuda(device: jax.Device) -> int:  # pyright: ignore[reportInvalidTypeForm]
    """The CUDA whose plugin `device` belongs to, by the plugin's own words ("cuda 12090"), else by what is installed."""
    if told := re.search(r"cuda (\d+)", device.client.platform_version):
        return int(told[1]) // 1000
    return next((n for n in (12, 13) if "not installed" not in plugin(n)), deviceless.CUDA)


def instructions() -> list[str]:
    """The vector instruction sets of this processor, as far as XLA may use them; [] where nothing tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return []
    flags = next((line.partition(":")[2].split() for line in lines if re.match(r"(flags|Features)\s*:", line)), [])
    narrow = re.search(r"xla_cpu_max_isa=(SSE4_2|AVX2?)\b", os.environ.get("XLA_FLAGS", ""), re.IGNORECASE)
    return sorted(f for f in flags if _VECTORS.match(f) and not (narrow and _WIDEST.match(f)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _short(value: Any) -> str:
    text = "absent" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
