"""Programs as files: compiled on one machine, loaded on another without tracing or compiling anything.

A serialised executable is a pickle, and a CPU's may call kernels whose machine code lies beside it (`kernel_files`). Both are
read only from the directory that the user named, and only after their digests and everything that they were compiled from and
for (`provenance`) have been found equal to what is here and now.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform as machine
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from ninfer_jax.config import EngineConfig
from ninfer_jax.config.engine import AUTO_FIELDS
from ninfer_jax.programs import provenance
from ninfer_jax.programs.card import Compilation, compile_program, facts_of
from ninfer_jax.programs.kernel_files import SUFFIX, listed_kernels, write_kernels
from ninfer_jax.programs.programs import Programs
from ninfer_jax.programs.setup import Setup
from pallas_kernels import cpu, targets

MANIFEST = "manifest.json"
FORMAT = 2
_NAMED = 6  # fields that a refusal names
Progress = Callable[[str, int, int], None]


def compile_to(
    directory: Path, setup: Setup, target: str, names: Iterable[str] | None = None, progress: Progress | None = None
) -> dict[str, tuple[Compilation, int]]:
    """Compile programs (None: all that an engine compiles before it serves) for `target` ("cpu" or a card) and write them with
    their manifest to directory/target.

    Returns each program's facts and its executable's size. The manifest is written last: a directory without one is not a
    set of programs. ValueError, one line, for a directory that holds something else, and for a file that cannot be written.
    """
    programs = setup.programs()
    names = list(programs.eager if names is None else names)
    out = check_place(directory, target)
    # Before a line of it is traced: what is edited while minutes pass is not in these programs.
    made_of, configuration = provenance.made_of(target, kernels=setup.kernels), setup.configuration(programs)
    with writing(out):
        (out / MANIFEST).unlink(missing_ok=True)
    facts: dict[str, tuple[Compilation, int]] = {}
    entries: dict[str, dict[str, Any]] = {}
    for done, name in enumerate(names):
        if progress:
            progress(name, done, len(names))
        start = time.perf_counter()
        if target == "cpu":
            with no_compilation_cache():
                compiled = programs.compiled(name)
            compilation = facts_of(name, target, compiled, 0.0, time.perf_counter() - start)
        else:
            compiled, compilation = compile_program(name, programs.source(name), target)
        payload, _, _ = serialize_executable.serialize(compiled)
        with writing(out / f"{name}.bin") as file:
            file.write_bytes(payload)
        facts[name] = compilation, len(payload)
        entries[name] = {
            "sha256": hashlib.sha256(payload).hexdigest(),
            "bytes": len(payload),
            "compile_s": round(time.perf_counter() - start, 3),
        }
        entries[name] |= {k: v for k, v in compilation.json().items() if k not in ("name", "target", "compile_s")}
        if setup.kernels == "cpu":
            entries[name]["calls"] = cpu.called(compiled.as_text() or "")
        del compiled, payload
    with writing(out):
        kernels = write_kernels(out, (call for entry in entries.values() for call in entry.get("calls", ())))
    manifest = {
        "format": FORMAT,
        **made_of,
        "device": _device_name(target),
        "python": machine.python_version(),
        "needs": provenance.needs(target, setup.kernels),
        "configuration": configuration,
        "programs": entries,
        **({"kernels": kernels} if kernels else {}),
    }
    with writing(out / (MANIFEST + ".new")) as temporary:
        temporary.write_text(json.dumps(manifest, indent=1) + "\n")
        temporary.replace(out / MANIFEST)
    if progress:
        progress("done", len(names), len(names))
    return facts


def check_place(directory: Path, target: str) -> Path:
    """directory/target, made if need be, for `compile_to` to write to; ValueError where it holds something else."""
    out = directory / target
    with writing(out):
        directory.mkdir(parents=True, exist_ok=True)
        if out.exists() and any(out.iterdir()) and not (out / MANIFEST).exists() and not _only_programs(out):
            raise ValueError(f"{out} holds something else than compiled programs: name another directory")
        out.mkdir(exist_ok=True)
    return out


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """`path`, to be written to; ValueError names it with what the system has against that: a full disk names no file."""
    try:
        yield path
    except OSError as error:
        raise ValueError(f"{error.filename or path}: {error.strerror or error}") from error


@contextmanager
def no_compilation_cache() -> Iterator[None]:
    """Whatever JAX_COMPILATION_CACHE_DIR says: what XLA's CPU compiler took out of that cache, it serialises again without
    some of its functions ("Function wrapped_exponential not found", jaxlib 0.10.2), and only running it would tell."""
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it remembers whether it is in use
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def with_stored(config: EngineConfig, directory: Path, target: str) -> EngineConfig:
    """`config` with what it leaves open as the programs under `directory` for `target` were compiled; as it is where nothing there
    tells, which `StoredPrograms.open` then refuses."""
    folder = directory / target if (directory / target).is_dir() else directory
    try:
        written = read_manifest(folder / MANIFEST)["configuration"]
        open_fields = [name for name in AUTO_FIELDS if getattr(config, name) is None]
        open_fields += [name for name in ("dtype", "kernels") if getattr(config, name) == "auto" and name in written]
        return dataclasses.replace(config, **{name: written[name] for name in open_fields})
    except (ValueError, KeyError, TypeError):
        return config


class StoredPrograms:
    """Executables that were found to go with an engine and with the device that is here, not unpickled yet; made by `open`.
    workspace_bytes: the largest of a program that serves, as its compiler said."""

    def __init__(self, payloads: Mapping[str, bytes], workspace_bytes: int, kernels: Mapping[str, bytes]):
        self._payloads, self.workspace_bytes, self._kernels = payloads, workspace_bytes, kernels

    @classmethod
    def open(cls, directory: Path, setup: Setup, programs: Programs) -> StoredPrograms:
        """Read what lies under `directory` for the device that is here. ValueError, one line with what differs and what to
        run, for another target, version, code, configuration, driver or processor, and for a file that is not as it was
        written."""
        device = jax.devices()[0]
        target = "cpu" if device.platform == "cpu" else targets.of_device(device.device_kind)
        if target is None:
            raise ValueError(
                f"--programs: no programs can be compiled for {device.device_kind!r}; known targets: {', '.join(targets.names())}"
            )
        folder = directory / target if (directory / target).is_dir() else directory
        file = folder / MANIFEST
        again = f"compile again: {compile_command(setup, target, directory if folder == directory / target else folder.parent)}"
        manifest = read_manifest(file, again)
        if manifest.get("format") != FORMAT:
            raise ValueError(f"{file}: format is {manifest.get('format')} in the programs, {FORMAT} here; {again}")
        configuration = manifest.get("configuration")
        cuda = 0 if target == "cpu" else provenance.running_cuda(device)
        different = provenance.differences(configuration if isinstance(configuration, dict) else {}, setup.configuration(programs))
        different = provenance.differences(manifest, provenance.made_of(target, cuda, setup.kernels)) + different
        if different:
            # The layout follows from the rest: it is worth a word only where nothing else is different.
            named = [d for d in different if not d.startswith("layout ")][:_NAMED] or different
            more = f" and {len(different) - len(named)} more" if len(different) > _NAMED else ""
            raise ValueError(f"{file}: {', '.join(named)}{more}; {again}")
        try:
            reason = provenance.refusal(manifest["needs"], device)
            entries = {name: manifest["programs"][name] for name in programs.eager}
            workspace = max(programs.workspace(name, int(entries[name]["workspace_bytes"])) for name in programs.serving)
            digests = {name: str(entry["sha256"]) for name, entry in entries.items()}
            kernels = dict(listed_kernels(manifest, entries))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{file}: {_missing(error, manifest, programs)}; {again}") from None
        if reason:
            raise ValueError(f"{file}: {reason}")
        return cls(
            {name: _payload(folder / f"{name}.bin", sha256, again) for name, sha256 in digests.items()},
            workspace,
            {target: _payload(folder / (target + SUFFIX), sha256, again) for target, sha256 in kernels.items()},
        )

    def adopt(self, programs: Programs) -> None:
        """Give `programs` these executables, and XLA the kernels that they call."""
        device = jax.devices()[0]
        for target, code in self._kernels.items():
            cpu.install(target, code)
        for name, payload in self._payloads.items():
            programs.adopt(name, load_executable(programs, name, payload, device))


def load_executable(programs: Programs, name: str, payload: bytes, device: Any) -> jax.stages.Compiled:
    """The named program from its serialised executable, a pickle: only of bytes that are known to be this code's own."""
    # The trees are this code's own and need not be read from a file.
    trees = jax.tree.structure((programs.source(name)[1], {})), jax.tree.structure(programs.result(name))
    return serialize_executable.deserialize_and_load(payload, *trees, backend=device.client, execution_devices=[device])


def _missing(error: Exception, manifest: Mapping[str, Any], programs: Programs) -> str:
    listed = manifest.get("programs")
    if isinstance(listed, dict) and (absent := [name for name in programs.eager if name not in listed]):
        return f"program {', '.join(absent)} is missing"
    return f"damaged ({type(error).__name__}: {error})"


def read_manifest(file: Path, again: str = "compile programs with `ninfer-jax compile`") -> dict[str, Any]:
    """The manifest that `compile_to` wrote last; again: what to do where it cannot be read, for the ValueError."""
    try:
        manifest = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror or error}; {again}") from None
    except ValueError:
        raise ValueError(f"{file}: not JSON; {again}") from None
    if not isinstance(manifest, dict):
        raise ValueError(f"{file}: no manifest of programs; {again}")
    return manifest


def compile_command(setup: Setup, target: str, out: Path | str, model: str = "MODEL") -> str:
    """The command that compiles programs for an engine of this configuration."""
    facts = setup.configuration(setup.programs())
    fields = ("context", "slots", "pool", "draft", "drafter", "kv", "prefill_chunk", "dtype", "kernels")
    options = [f"--{field.replace('_', '-')} {facts[field]}" for field in fields if field in facts]
    if setup.valid_ids == setup.model.vocab_size:  # as without a tokenizer, or with one that names every row
        options.append("--no-tokenizer")
    return f"ninfer-jax compile {model} --target {target} {' '.join(options)} --out {shlex.quote(str(out))}"


def _payload(file: Path, sha256: str, again: str) -> bytes:
    try:
        payload = file.read_bytes()
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror or error}; {again}") from None
    if hashlib.sha256(payload).hexdigest() != sha256:
        raise ValueError(f"{file}: sha256 differs from the manifest's: the file was changed or damaged; {again}")
    return payload


def _device_name(target: str) -> str:
    return "cpu" if target == "cpu" else targets.get(target).description


def _only_programs(folder: Path) -> bool:
    return all(f.suffix in (".bin", SUFFIX) or f.name.startswith(MANIFEST) for f in folder.iterdir())
