"""What surrounds the measurements: where they were made, executables from elsewhere, and compiled figures without a card."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from device.kernels import interleaved
from device.report import Stage
from device.whole_model import Session, Size, Weights, emitted
from ninfer_jax.programs import executables as stored
from ninfer_jax.programs.card import compile_program
from ninfer_jax.programs.plan import resident_bytes
from ninfer_jax.programs.setup import Setup
from pallas_kernels import deviceless, targets
from pallas_kernels.lab import registry, work

PLUGINS = tuple(f"jax-cuda{n}-{part}" for n in (12, 13) for part in ("plugin", "pjrt"))
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes", *PLUGINS)
ASKED = ("name", "driver_version", "memory.total", "memory.used", "power.limit", "clocks.max.sm", "clocks.max.mem")


def environment(stage: Stage) -> None:
    """Versions, device, driver, memory."""
    stage.run("versions", lambda: {"python": platform.python_version(), **dict(_versions())})
    cores = len(os.sched_getaffinity(0))
    stage.run("machine", lambda: {"system": platform.platform(), "cores": cores, "load": os.getloadavg()[0]})
    stage.run("device", _device)
    if jax.default_backend() == "gpu":
        stage.run("nvidia-smi", _smi)
    else:
        stage.leave_out("driver", "GPU only")


def _versions() -> Iterable[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue


def _device() -> Mapping[str, Any]:
    device = jax.devices()[0]
    known = targets.of_device(device.device_kind)
    return {
        "kind": device.device_kind,
        "target": known or "none: no description of this device, so no tuned block sizes",
        "backend": device.client.platform_version.splitlines()[0],
        "compute_capability": getattr(device, "compute_capability", "none"),
        "memory_limit_bytes": limit_bytes() or "not told",
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("XLA_", "JAX_"))},
    }


def _smi() -> Mapping[str, Any]:
    command = ["nvidia-smi", f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        return {"driver": f"not told ({type(error).__name__})"}
    return dict(zip(ASKED, (part.strip() for part in told.split(",")), strict=False))


def limit_bytes() -> int | None:
    return _memory("bytes_limit")


def peak_bytes() -> int | None:
    return _memory("peak_bytes_in_use")


def _memory(field: str) -> int | None:
    stats = jax.devices()[0].memory_stats()
    return stats.get(field) if stats else None


def executables(stage: Stage, folder: Path | None, size: Size, weights: Weights) -> None:
    """Programs compiled elsewhere, without this device: loaded, and run at the first depth."""
    commands = [compile_command(size, setup) for setup in size.setups.values()]
    if folder is None:
        made = f"; made by e.g. `{commands[0]}`" if size.preset else ""
        stage.leave_out("executables compiled elsewhere", f"no --programs{made}")
        return
    found = _configuration(folder)
    matching = [(name, s) for name, s in size.setups.items() if s.configuration(s.programs()) == found]
    if not matching:
        wanted = "; or ".join(commands)
        stage.record(str(folder), {"failed": f"compiled for none of the configurations run here; compile with {wanted}"})
        return
    ((name, setup),) = matching
    programs = setup.programs()
    loaded = stage.run(f"load ({name})", lambda: _loaded(programs, folder, setup), guess=3)
    if loaded is None:
        return
    if weights.arrays is None and stage.run("weights", lambda: weights.draw(size.setup(1, size.engine.draft)), guess=5) is None:
        return
    stage.run(f"run ({name})", lambda: _run(size, setup, programs, weights), guess=5)


def _configuration(folder: Path) -> Any:
    """What the programs were compiled for, by their manifest."""
    here = "cpu" if jax.default_backend() == "cpu" else targets.of_device(jax.devices()[0].device_kind)
    inner = folder / here if here and (folder / here).is_dir() else folder
    return stored.read_manifest(inner / stored.MANIFEST).get("configuration")


def _loaded(programs: Any, folder: Path, setup: Setup) -> Mapping[str, Any]:
    start = time.perf_counter()
    stored.StoredPrograms.open(folder, setup, programs).adopt(programs)
    return {"load_s": round(time.perf_counter() - start, 3), "from": str(folder)}


def _run(size: Size, setup: Setup, programs: Any, weights: Weights) -> Mapping[str, Any]:
    session = Session(size, setup, programs, weights)
    depths = (size.depths[0],) if setup.shape.slots == 1 else size.shared[0]
    found = dict(session.decode(depths))
    # Prefill and begin, as a request would call them.
    session.admit(depths, programs.chunk + setup.shape.draft + 1)
    seconds = session.prefill(programs.chunk, 0)
    session.state, out = programs.begin(session.parameters, session.state, np.int32(0))
    (first, *_) = emitted([out], setup.shape.slots)
    return found | {"prefill_chunk_s": seconds, "first_token": first[0]}


def compile_command(size: Size, setup: Setup) -> str:
    """What compiles the executables of a configuration on a machine without the card."""
    target = targets.of_device(jax.devices()[0].device_kind) or "rtx4090"
    return stored.compile_command(setup, target, "DIR", f"{size.preset or 'MODEL'} --recipe q4")


def compiled_kernels(stage: Stage, target: str, ops: list[str] | None = None) -> None:
    """Without a card: what the compiler makes of every case for `target`."""
    stage.note("Compiled for a card that is not here; us are modelled from it, a floor without latency. Nothing was run.")
    if _without_tools(stage):
        return
    for case in interleaved(registry.cases(ops)):
        stage.run(f"{case.op}/{case.name}", functools.partial(_row, case, target), kind=case.op, guess=5)


def _row(case: registry.Case, target: str) -> Mapping[str, Any]:
    (row,) = work.compiled([(case.op, case.name, None)], target)
    if isinstance(row, str):
        return {"failed": row}
    fields = ("registers", "spill_bytes", "smem_bytes", "blocks_per_sm", "bytes_moved", "ideal_bytes", "modelled_us", "limit")
    return {f: getattr(row, f) for f in fields}


def compiled_programs(stage: Stage, target: str, size: Size) -> None:
    """Without a card: launches and bytes of the whole model's programs, and what they need of the card."""
    stage.note("Launches and bytes as compiled; nothing was run. The total is weights, state and the largest workspace.")
    if _without_tools(stage):
        return
    card = targets.get(target)
    for name, setup in size.setups.items():
        if setup.shape.draft:
            for program in ("decode_round", "prefill"):
                stage.run(f"{program} ({name})", functools.partial(_facts, setup, program, card), kind="program", guess=60)


def _facts(setup: Setup, program: str, card: targets.Target) -> Mapping[str, Any]:
    programs = setup.programs()
    _, facts = compile_program(program, programs.source(program), card.name)
    total = resident_bytes(programs) + facts.workspace_bytes
    told = {f: getattr(facts, f) for f in ("launches", "branch_kernels", "copies", "temporary_bytes", "lower_s", "compile_s")}
    return told | {"total_bytes": total, "card_bytes": card.memory_bytes, "left_bytes": card.memory_bytes - total}


def _without_tools(stage: Stage) -> bool:
    missing = deviceless.missing_tools()
    if missing:
        stage.leave_out("everything", f"compiling for a card needs {', '.join(missing)}: pip install 'ninfer-jax[aot]'")
    return bool(missing)
