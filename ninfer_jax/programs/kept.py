"""Programs kept from start to start: `$XDG_CACHE_HOME/ninfer_jax/programs`, one file a program with the kernels it calls.

A file's name is a digest of all that decides the program: configuration, shapes, code, compiler, device, settings of JAX and
XLA. Nothing is ever compared after that: what differs has another name. A serialised executable is a pickle and calls machine code;
both are read only from a folder that nobody else can write, and after their digest has been found right (`KeptFiles`).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import platform as machine
import re
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from ninfer_jax.programs import provenance
from ninfer_jax.programs.card import workspace_bytes
from ninfer_jax.programs.executables import load_executable, no_compilation_cache
from ninfer_jax.programs.programs import Compiled, Programs
from ninfer_jax.programs.setup import Setup
from pallas_kernels import cpu, driver, targets
from pallas_kernels.kept_files import KeptFiles

VARIABLE = "NINFER_JAX_PROGRAM_CACHE"
MOST_BYTES = 2 << 30  # an engine of the bundled model takes 5 MB, one of the 27B on a card about 20 (compiled)
FILES = KeptFiles("programs", ".bin", "program", lambda: MOST_BYTES)
LOADERS = 2  # threads: deserialising leaves Python's lock alone
_HEAD = struct.Struct("<Q")
_log = logging.getLogger(__name__)
# Settings of JAX that decide nothing about a program: where files are, what is logged, which devices there are.
_NO_INGREDIENT = re.compile(
    r"jax_((enable_)?compilation_cache|persistent_cache|dump|log|debug_log|compiler_detailed|explain|platform|traceback|raise_"
    r"|tracer_error|.*_timeout).*"
)
# Of the environment, what XLA reads; the memory that JAX takes is no ingredient.
_READ_BY_XLA = re.compile(
    r"XLA_(?!PYTHON_CLIENT|CLIENT_MEM).*|TF_.*(DETERMINISTIC|AUTOTUNE|TF32).*|NVIDIA_TF32_OVERRIDE|(PJRT_)?NPROC"
)


def wanted(setting: str) -> bool:
    """Whether programs are kept: not where `EngineConfig.program_cache` or the environment says "off", nor where JAX's own
    compilation cache is in use, which then keeps them. ValueError for another word in the environment."""
    told = os.environ.get(VARIABLE, "auto") or "auto"
    if told not in ("auto", "off"):
        raise ValueError(f"{VARIABLE} is {told!r} in the environment, it must be 'auto' or 'off'")
    jaxs_own = jax.config.values["jax_compilation_cache_dir"] and jax.config.values["jax_enable_compilation_cache"]
    return setting == "auto" and told == "auto" and not jaxs_own


class KeptPrograms:
    """The kept programs of one engine: read side by side with something else by `begin` and `finish`, or one by one by `take`.

    told: called with a line for what a user waits for."""

    def __init__(self, setup: Setup, programs: Programs, told: Callable[[str], object] = lambda line: None):
        self._programs, self._told, self._device = programs, told, jax.devices()[0]
        self._made_of = json.dumps(ingredients(setup, programs, self._device), sort_keys=True)
        self._workspace: dict[str, int] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._loading: dict[str, Any] = {}
        programs.take_from(self.take)

    @property
    def key(self) -> str:
        """Digest of all that decides these programs; of JAX's settings as they are now, which are those it would compile with."""
        settings = {k: str(v) for k, v in sorted(jax.config.values.items()) if not _NO_INGREDIENT.fullmatch(k)}
        return hashlib.sha256(f"{self._made_of}\n{json.dumps(settings)}".encode()).hexdigest()[:24]

    def begin(self) -> None:
        """Have threads load what is there of the programs that serve."""
        self._pool = ThreadPoolExecutor(LOADERS, "ninfer-programs")
        key = self.key  # settings of JAX may be this thread's own
        self._loading = {name: self._pool.submit(self._load, name, key) for name in self._programs.eager}

    def finish(self, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Give the programs what the threads have loaded, and compile what is not there; no two processes do that at once for
        the same programs. progress: as for `Programs.compile_all`."""
        for name, loading in self._loading.items():
            if (found := loading.result()) is not None:
                self._programs.adopt(name, found)
        if self._pool is not None:
            self._pool.shutdown()
        if len(self._workspace) == len(self._programs.eager):
            self._programs.compile_all(progress)
            return
        with FILES.alone(self.key, lambda: self._told("another process compiles these programs: waiting for them")):
            self._programs.compile_all(progress)

    def take(self, name: str) -> Compiled:
        """The named program, loaded, or compiled and kept."""
        key = self.key
        found = self._load(name, key)
        if found is None:
            with no_compilation_cache():
                found = self._programs.compile(name)
            self._workspace[name] = workspace_bytes(found) or 0
            FILES.write(f"{key}.{name}", pack(found, self._workspace[name], self._programs.kernels == "cpu"))
        return found

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the largest workspace of a program that serves, once they are there."""
        return max(self._programs.workspace(name, self._workspace[name]) for name in self._programs.serving)

    def _load(self, name: str, key: str) -> Compiled | None:
        """The named program; None where there is none, or, with a warning, where it cannot be used."""
        kept = FILES.read(f"{key}.{name}")
        if kept is None:
            return None
        try:
            payload, kernels, workspace = unpack(kept)
            for target, code in kernels.items():
                cpu.install(target, code)
            found = load_executable(self._programs, name, payload, self._device)
        except Exception as error:  # whatever a deserialiser raises: the program can be made again
            reason = " ".join(str(error).split())[:200]
            _log.warning("a kept program is compiled again: %s: %s", name, reason or type(error).__name__)
            return None
        self._workspace[name] = workspace
        return found


def pack(compiled: Compiled, workspace: int, calls_kernels: bool) -> bytes:
    """A program as a file has it: a header, the code of the kernels it calls, its executable."""
    payload, _, _ = serialize_executable.serialize(compiled)
    called = cpu.called(compiled.as_text() or "") if calls_kernels else []
    codes = [cpu.object_code(target) for target in called]
    header = {"workspace": workspace, "kernels": [[t, len(code)] for t, code in zip(called, codes, strict=True)]}
    told = json.dumps(header).encode()
    return b"".join([_HEAD.pack(len(told)), told, *codes, payload])


def unpack(kept: bytes) -> tuple[bytes, dict[str, bytes], int]:
    """Executable, kernels and workspace of what `pack` made."""
    (length,) = _HEAD.unpack_from(kept)
    at = _HEAD.size + length
    header, kernels = json.loads(kept[_HEAD.size : at]), {}
    for target, size in header["kernels"]:
        kernels[target] = kept[at : at + size]
        at += size
    return kept[at:], kernels, int(header["workspace"])


def ingredients(setup: Setup, programs: Programs, device: Any) -> dict[str, Any]:
    """All that decides an engine's programs on this machine but JAX's settings, as JSON."""
    on_cpu = device.platform == "cpu"
    target = "cpu" if on_cpu else targets.of_device(device.device_kind) or device.device_kind
    found = {
        "configuration": setup.configuration(programs),
        "made_of": provenance.made_of(target, 0 if on_cpu else provenance.running_cuda(device), setup.kernels),
        "python": machine.python_version_tuple()[:2],  # its pickles
        "flax": importlib.metadata.version("flax"),
        "device": [device.device_kind, device.client.platform_version],
        "environment": {k: v for k, v in sorted(os.environ.items()) if _READ_BY_XLA.fullmatch(k)},
    }
    if on_cpu:
        # XLA compiles for the processor it finds, and cuts loops for its cores.
        found |= {"instructions": provenance.instructions(), "processor": _processor(), "cores": _cores()}
        return found | ({"llvm": cpu.here().key()} if setup.kernels == "cpu" else {})
    return found | {"driver": driver.cuda_version(), "libraries": _libraries()}


def _processor() -> list[str]:
    """The processor's own names, by which compilers tune."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return [machine.processor()]
    return [
        line
        for line in lines
        if re.match(r"(vendor_id|cpu family|model|model name|stepping|CPU (part|variant|implementer))\s*:", line)
    ]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _libraries() -> dict[str, str]:
    """NVIDIA's own libraries, whose algorithms a card's programs may have been tuned with."""
    names = ((dist.metadata["Name"] or "", dist.version) for dist in importlib.metadata.distributions())
    return dict(sorted((name, version) for name, version in names if name.startswith("nvidia-")))
