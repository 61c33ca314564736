"""LLVM on this machine: what it compiles for, machine code, functions by address.

`XLA_FLAGS=--xla_cpu_max_isa=AVX2` holds for kernels as it does for XLA's own code.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import os
import platform
import re
import threading

from pallas_kernels.cpu import kept

_NEEDED = ("avx2", "fma", "f16c", "bmi2")
INSTEAD = "choose kernels='xla'"
_lock = threading.Lock()
_alive: list[object] = []  # engines own the code they made
# Code and constants of a kernel lie where the process has room, and in one that has mapped gigabytes that may be further apart
# than the 2 GiB that the smaller models reach: LLVM's loader then ends the process.
_CODE_MODEL = "large"
_LEVEL = 3
# Vectors are spelled out; these two would only make more code of the loops around them.
_OFF = ("loop_vectorization", "slp_vectorization")
# Features by which LLVM picks instructions; others (rdpru, xsaves, ...) come and go with systems and are in no kernel.
_PICKED = re.compile(r"\+(sse|ssse|avx|amx|fma|f16c|bmi|lzcnt|popcnt|movbe|adx|gfni|vaes|vpclmul|xop|tbm)")


class KernelError(RuntimeError):
    """One line: why kernels cannot be compiled or called here, and what to choose instead."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


@dataclasses.dataclass(frozen=True)
class Machine:
    """The machine that kernels are compiled for: LLVM's triple, name of the CPU, features as `+avx2,...`, version of LLVM."""

    triple: str
    cpu: str
    features: str
    llvm: str

    def has(self, *features: str) -> bool:
        return {f"+{f}" for f in features} <= set(self.features.split(","))

    def instructions(self) -> list[str]:
        """The features that machine code may use, by LLVM's names without the sign."""
        return [f[1:] for f in self.features.split(",") if _PICKED.match(f)]

    def key(self) -> str:
        return "\n".join(dataclasses.astuple(self))


@functools.cache
def here() -> Machine:
    """This machine. KernelError where kernels cannot be compiled or run on it."""
    binding = _binding()
    if platform.machine().lower() not in ("x86_64", "amd64"):
        raise KernelError(f"CPU kernels are for x86-64 with AVX2 and FMA, this is {platform.machine()}: {INSTEAD}")
    try:
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        features, cpu = dict(binding.get_host_cpu_features()), binding.get_host_cpu_name()
        triple, version = binding.get_process_triple(), ".".join(map(str, binding.llvm_version_info))
    except Exception as e:
        raise KernelError(f"LLVM does not start ({e}): {INSTEAD}") from e
    if m := re.search(r"--xla_cpu_max_isa=(\w+)", os.environ.get("XLA_FLAGS", "")):
        features, cpu = _limited(features, cpu, m.group(1).upper())
    missing = [f for f in _NEEDED if not features.get(f)]
    if missing:
        raise KernelError(f"CPU kernels need {', '.join(_NEEDED)}; this CPU is without {', '.join(missing)}: {INSTEAD}")
    wanted = sorted(f"+{name}" for name, there in features.items() if there)
    return Machine(triple, cpu, ",".join(wanted), version)


def _limited(features: dict[str, bool], cpu: str, isa: str) -> tuple[dict[str, bool], str]:
    """Without what XLA would not use under the flag, and then for no CPU by name: its name would bring features back."""
    if isa.startswith(("AVX512", "AMX")):
        return features, cpu
    dropped = r"avx512|avx10|avxvnni|avxifma|avxneconvert|amx|evex512"
    if isa != "AVX2":
        dropped += r"|^(avx2|fma|f16c|bmi2)$"
    return {k: v for k, v in features.items() if not re.search(dropped, k)}, "x86-64"


def object_code(source: str) -> bytes:
    """Machine code of LLVM module `source`, optimised for this machine; from the cache where it is there."""
    key = digest(source)
    code = kept.read(key)
    if code is None:
        code = _compile(source, here())
        kept.write(key, code)
    return code


def digest(source: str) -> str:
    """Digest of all that the code of a module depends on: its text, the machine, LLVM and what is asked of it."""
    return hashlib.sha256(f"{here().key()}\n{_CODE_MODEL} {_LEVEL} {_OFF}\n{source}".encode()).hexdigest()[:32]


def load(name: str, code: bytes) -> int:
    """The address of function `name` of object code, which stays loaded."""
    binding = _binding()
    with _lock:
        for symbol in ("malloc", "free"):
            binding.add_symbol(symbol, ctypes.cast(getattr(ctypes.CDLL(None), symbol), ctypes.c_void_p).value)
        engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _target(here()))
        engine.add_object_file(binding.object_file.ObjectFileRef.from_data(code))
        engine.finalize_object()
        _alive.append(engine)
        return engine.get_function_address(name)


def assembly(source: str) -> str:
    """The machine code of a module as text, for looking at."""
    with _lock:
        module, target = _optimised(source, here())
        return target.emit_assembly(module)


def _compile(source: str, machine: Machine) -> bytes:
    with _lock:
        module, target = _optimised(source, machine)
        return target.emit_object(module)


def _optimised(source: str, machine: Machine):
    binding = _binding()
    try:
        module = binding.parse_assembly(source)
        module.verify()
        target = _target(machine)
        options = binding.create_pipeline_tuning_options(speed_level=_LEVEL)
        for name in _OFF:
            setattr(options, name, False)
        passes = binding.create_pass_builder(target, options)
        passes.getModulePassManager().run(module, passes)
    except RuntimeError as e:
        raise KernelError(f"LLVM {machine.llvm} refuses a CPU kernel ({e}): {INSTEAD}") from e
    return module, target


def _target(machine: Machine):
    target = _binding().Target.from_triple(machine.triple)
    return target.create_target_machine(
        opt=_LEVEL, cpu=machine.cpu, features=machine.features, reloc="pic", codemodel=_CODE_MODEL, jit=True
    )


def _binding():
    try:
        import llvmlite.binding as binding
    except ImportError as e:
        raise KernelError(f"CPU kernels need llvmlite ({e}); pip install llvmlite, or {INSTEAD}") from e
    return binding


@functools.cache
def check() -> None:
    """KernelError where LLVM does not get as far as a function that returns."""
    try:
        address = load("check", object_code("define i64 @check() { ret i64 9 }"))
        right = ctypes.CFUNCTYPE(ctypes.c_int64)(address)() == 9
    except KernelError:
        raise
    except Exception as e:
        raise KernelError(f"LLVM does not compile ({e}): {INSTEAD}") from e
    if not right:
        raise KernelError(f"LLVM compiles for another machine than this one: {INSTEAD}")
