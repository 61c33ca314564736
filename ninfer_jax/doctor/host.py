"""Judgements on what every machine has: versions, processor, memory, disk, folders of kept files."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ninfer_jax.doctor.finding import FINE, NOTE, WRONG, Finding, gib
from ninfer_jax.doctor.inputs import Folder, Inputs

LITTLE_MEMORY = 2 << 30  # the bundled model takes under one GiB
LITTLE_DISK = 1 << 30
SLOW_DISK = 200e6  # bytes a second: 16 GB of weights take more than a minute
WEIGHTS = 16e9  # bytes of the 27B in 4 bits


def judge_host(inputs: Inputs) -> list[Finding]:
    """Findings about the host, the most general first."""
    return [*_versions(inputs), _processor(inputs), _memory(inputs), *_disk(inputs), *_folders(inputs), *_environment(inputs)]


def _versions(inputs: Inputs) -> Iterator[Finding]:
    told = ", ".join(f"{name} {version}" for name, version in inputs.versions.items())
    facts = dict(inputs.versions) | {"python": inputs.python, "system": inputs.system, "kernel": inputs.kernel, "wsl": inputs.wsl}
    status, advice = FINE, ""
    if {"jax", "jaxlib"} <= inputs.versions.keys() and inputs.versions["jax"] != inputs.versions["jaxlib"]:
        status, advice = WRONG, f"jax and jaxlib differ: pip install 'jaxlib=={inputs.versions['jax']}'"
    yield Finding("versions", status, f"{told}; Python {inputs.python} on {inputs.system}", advice, facts)
    if inputs.wsl:
        yield Finding(
            "WSL",
            NOTE,
            "Linux runs inside Windows, which takes some of a card's memory and gives this side half of the main memory",
            "memory= in .wslconfig raises that; files of Windows' own disks (/mnt/c) are read slowly: keep models on this side",
        )


def _processor(inputs: Inputs) -> Finding:
    fields = dict(re.findall(r"^(\S[^\t:]*?)\s*:\s*(.*)$", inputs.cpuinfo.split("\n\n")[0], re.MULTILINE))
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    name = fields.get("model name", "a processor that does not tell its name")
    vectors = [f for f in ("avx2", "fma", "f16c", "bmi2", "avx512f", "avx512_bf16", "amx_tile") if f in flags]
    facts = {"processor": name, "vectors": vectors, "cores": inputs.cores, "own_kernels": not inputs.kernels_error}
    text = f"{name}, {inputs.cores} cores, {' '.join(vectors) or 'no vector instructions known'}"
    if inputs.kernels_error:
        return Finding("processor", WRONG, f"{text}; {inputs.kernels_error}", "--kernels xla runs here, slower", facts)
    return Finding("processor", FINE, text, "", facts)


def _memory(inputs: Inputs) -> Finding:
    found = re.search(r"^MemTotal:\s*(\d+) kB", inputs.meminfo, re.MULTILINE)
    total = int(found[1]) * 1024 if found else None
    facts = {"total_bytes": total, "available_bytes": inputs.available}
    if inputs.available is None:
        return Finding(
            "memory", NOTE, "nothing tells how much memory is free", "a model that does not fit will not be refused", facts
        )
    text = f"{gib(inputs.available)} may be taken" + (f" of {gib(total)}" if total else "")
    if inputs.available < LITTLE_MEMORY:
        return Finding("memory", NOTE, text, "close something else, or raise the limit of this control group", facts)
    return Finding("memory", FINE, text, "", facts)


def _disk(inputs: Inputs) -> Iterator[Finding]:
    facts = {"free_bytes": inputs.free_disk, "read_bytes_s": inputs.read_rate and round(inputs.read_rate)}
    if inputs.free_disk is None:
        return
    text, advice = f"{gib(inputs.free_disk)} free where compiled programs are kept", ""
    if inputs.read_rate is not None:
        text += f", read at {inputs.read_rate / 1e9:.2f} GB/s (measured, 64 MiB)"
        if inputs.read_rate < SLOW_DISK:
            advice = f"weights of 16 GB would take {WEIGHTS / inputs.read_rate:,.0f} s from it: keep models on a faster disk"
    if inputs.free_disk < LITTLE_DISK:
        advice = "free some space, or set XDG_CACHE_HOME to a place on another disk"
    yield Finding("disk", NOTE if advice else FINE, text, advice, facts)


def _folders(inputs: Inputs) -> Iterator[Finding]:
    for folder in inputs.folders:
        facts = {"folder": folder.name, "mode": f"{folder.mode:04o}", "own": folder.uid == inputs.uid, "bytes": folder.bytes}
        if why := _unsafe(folder, inputs.uid):
            yield Finding(f"kept files: {folder.name}", WRONG, f"{folder.path} {why[0]}: nothing in it is used", why[1], facts)
        else:
            yield Finding(
                f"kept files: {folder.name}", FINE, f"{folder.path}, {folder.bytes / 1e6:,.0f} MB, yours alone", "", facts
            )


def _unsafe(folder: Folder, uid: int) -> tuple[str, str] | None:
    if folder.uid != uid:
        return "belongs to somebody else", "remove it, or set XDG_CACHE_HOME to a folder of your own"
    if folder.mode & 0o022:
        return "can be written by others", f"chmod go-w {folder.path}"
    return None


def _environment(inputs: Inputs) -> Iterator[Finding]:
    """Settings that are easily forgotten; their values may hold paths and stay out of the facts."""
    for name, why in (
        ("JAX_PLATFORMS", "decides which devices JAX looks for"),
        ("XLA_FLAGS", "changes how programs are compiled"),
        ("CUDA_VISIBLE_DEVICES", "hides cards"),
        ("JAX_COMPILATION_CACHE_DIR", "has JAX keep what it compiles, in the place of this engine's kept programs"),
    ):
        if name in inputs.environment:
            yield Finding(
                name,
                NOTE,
                f"{inputs.environment[name]!r} in the environment: {why}",
                f"unset {name} if you did not mean to",
                {"set": True},
            )
    if "cuda" in inputs.environment.get("LD_LIBRARY_PATH", "").lower():
        yield Finding(
            "LD_LIBRARY_PATH",
            NOTE,
            "names a CUDA installation, whose libraries come before those that JAX brings",
            "unset LD_LIBRARY_PATH where JAX finds no card or complains of a version",
            {"set": True},
        )
