"""Programs as files: compiled on one machine, loaded on another without tracing or compiling anything.

A serialised executable is a pickle. It is read only from the directory that the user named, and only after its digest and
everything that it was compiled for have been found equal to what is here and now.
"""

from __future__ import annotations

import hashlib
import json
import platform as machine
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from ninfer_jax.programs.card import Compilation, compile_program, facts_of
from ninfer_jax.programs.programs import ALWAYS, Programs
from ninfer_jax.programs.setup import Setup
from pallas_kernels import targets

MANIFEST = "manifest.json"
FORMAT = 1
Progress = Callable[[str, int, int], None]


def compile_to(
    directory: Path, setup: Setup, target: str, names: Iterable[str] = ALWAYS, progress: Progress | None = None
) -> dict[str, tuple[Compilation, int]]:
    """Compile programs for `target` ("cpu" or a card) and write them with their manifest to directory/target.

    Returns each program's facts and its executable's size. The manifest is written last: a directory without one is not a
    set of programs. ValueError, one line, for a directory that holds something else, and for a file that cannot be written.
    """
    programs, names = setup.programs(), list(names)
    out = directory / target
    with writing(out):
        if out.exists() and any(out.iterdir()) and not (out / MANIFEST).exists() and not _only_programs(out):
            raise ValueError(f"{out} holds something else than compiled programs: name another directory")
        out.mkdir(parents=True, exist_ok=True)
        (out / MANIFEST).unlink(missing_ok=True)
    facts: dict[str, tuple[Compilation, int]] = {}
    entries = {}
    for done, name in enumerate(names):
        if progress:
            progress(name, done, len(names))
        start = time.perf_counter()
        if target == "cpu":
            with _no_compilation_cache():
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
        del compiled, payload
    manifest = {
        "format": FORMAT,
        "target": target,
        "device": _device_name(target),
        "jax": jax.__version__,
        "jaxlib": jax.lib.__version__,
        "python": machine.python_version(),
        "configuration": setup.digest(programs),
        "programs": entries,
    }
    with writing(out / (MANIFEST + ".new")) as temporary:
        temporary.write_text(json.dumps(manifest, indent=1) + "\n")
        temporary.replace(out / MANIFEST)
    if progress:
        progress("done", len(names), len(names))
    return facts


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """What the system has to say against it, with the file: a full disk does not name one."""
    try:
        yield path
    except OSError as error:
        raise ValueError(f"{error.filename or path}: {error.strerror or error}") from error


@contextmanager
def _no_compilation_cache() -> Iterator[None]:
    """Whatever JAX_COMPILATION_CACHE_DIR says: what XLA's CPU compiler took out of that cache, it serialises again without
    some of its functions ("Function wrapped_exponential not found", jaxlib 0.10.2), and only running it would tell."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it remembers whether it is in use
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def load_into(programs: Programs, directory: Path, setup: Setup) -> None:
    """Give `programs` the executables under `directory` for the device that is here.

    ValueError, naming what differs, for another target, version, configuration or a file that is not as it was written;
    nothing is unpickled before all of that has been checked.
    """
    device = jax.devices()[0]
    target = "cpu" if device.platform == "cpu" else targets.of_device(device.device_kind)
    if target is None:
        raise ValueError(
            f"--programs: no programs can be compiled for {device.device_kind!r}; known targets: {', '.join(targets.names())}"
        )
    folder = directory / target if (directory / target).is_dir() else directory
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{folder / MANIFEST}: {error.strerror or error}; compile programs with `ninfer-jax compile`") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"{folder / MANIFEST}: not JSON") from None
    here = {
        "format": FORMAT,
        "target": target,
        "jax": jax.__version__,
        "jaxlib": jax.lib.__version__,
        "configuration": setup.digest(programs),
    }
    for field, value in here.items():
        if not isinstance(manifest, dict) or manifest.get(field) != value:
            found = manifest.get(field) if isinstance(manifest, dict) else None
            raise ValueError(f"{folder / MANIFEST}: {field} is {found!r}, this engine needs {value!r}; compile again for it")
    payloads = {}
    for name in ALWAYS:
        entry = manifest["programs"].get(name) if isinstance(manifest.get("programs"), dict) else None
        if not isinstance(entry, dict):
            raise ValueError(f"{folder / MANIFEST}: program {name} is missing; compile again")
        try:
            payloads[name] = (folder / f"{name}.bin").read_bytes()
        except OSError as error:
            raise ValueError(f"{folder / name}.bin: {error.strerror or error}") from None
        if hashlib.sha256(payloads[name]).hexdigest() != entry.get("sha256"):
            raise ValueError(
                f"{folder / name}.bin: sha256 differs from the manifest's: the file was changed or damaged; compile again"
            )
    for name, payload in payloads.items():
        programs.adopt(name, _deserialize(payload, programs, name, device))


def _deserialize(payload: bytes, programs: Programs, name: str, device: jax.Device) -> Any:
    # The trees are this code's own and need not be read from a file.
    in_tree = jax.tree.structure((programs.source(name)[1], {}))
    return serialize_executable.deserialize_and_load(
        payload, in_tree, jax.tree.structure(programs.result(name)), backend=device.client, execution_devices=[device]
    )


def _device_name(target: str) -> str:
    return "cpu" if target == "cpu" else targets.get(target).description


def _only_programs(folder: Path) -> bool:
    return all(f.suffix == ".bin" or f.name.startswith(MANIFEST) for f in folder.iterdir())
