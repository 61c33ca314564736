"""The phases of a start, from an empty process to the first token, each run in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ninfer_jax.programs.kept import VARIABLE

PHASES = ("interpreter", "imports", "plan", "weights", "programs", "first token")
LONGEST = 3600  # seconds of one start

# Runs in the other process, and only with what a program of a user's would do.
_START = """
import sys, time
began = time.time()
import json
sys.path[:] = json.loads(sys.argv[1])
job = json.loads(sys.argv[2])
from ninfer_jax import Engine, EngineConfig, SamplingParams
marks, weights = [("interpreter", began), ("imports", time.time())], {"bytes": 0, "end": 0.0}
def progress(stage, done, total):
    if stage == "weights":
        weights.update(bytes=done, end=time.time())
try:
    engine = Engine.load(job["model"], EngineConfig(**job["config"]), before=lambda requests: marks.append(("plan", time.time())),
                         progress=progress, **job["loading"])
    marks += [("weights", weights["end"] or marks[-1][1]), ("programs", time.time())]
    answer = engine.generate([0, 1, 2, 3], SamplingParams(temperature=0, max_new_tokens=1, ignore_eos=True))
    marks.append(("first token", time.time()))
    print(json.dumps({"marks": marks, "bytes": weights["bytes"], "compilations": engine.compilations, "device": engine.device}))
except (ValueError, OSError) as error:
    print(json.dumps({"refused": str(error)}))
"""


@dataclass(frozen=True)
class Start:
    """One start. kind: "cold", with nothing compiled before, or "warm". seconds: of each of `PHASES`. bytes: of weights read."""

    kind: str
    seconds: Mapping[str, float]
    bytes: int
    compilations: int
    device: str

    @property
    def total(self) -> float:
        """Seconds from the process' first moment to the first token."""
        return sum(self.seconds.values())

    def json(self) -> dict[str, Any]:
        """All of it, and the total."""
        return asdict(self) | {"total": self.total}


def starts(model: str, config: Mapping[str, Any], loading: Mapping[str, Any], warm: int) -> Iterator[Start]:
    """One cold start, whose compiled programs and kernels nobody has, then `warm` ones that find them. The files of the weights
    stay in the system's cache from start to start, if they were there. ValueError for what the engine refuses."""
    with tempfile.TemporaryDirectory() as place:
        kept = Path(place) / "cache"
        kept.mkdir(mode=0o700)
        for kind in ("cold", *["warm"] * warm):
            yield _start(kind, model, config, loading, kept)


def _start(kind: str, model: str, config: Mapping[str, Any], loading: Mapping[str, Any], kept: Path) -> Start:
    environment = {**os.environ, "XDG_CACHE_HOME": str(kept), VARIABLE: "auto"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # it would keep the programs in their place
    job = json.dumps({"model": model, "config": dict(config), "loading": dict(loading)})
    command = [sys.executable, "-c", _START, json.dumps(sys.path), job]
    before = time.time()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=LONGEST)
    if done.returncode:
        raise ValueError(f"a start ended with status {done.returncode}; what it said stands above")
    told = json.loads(done.stdout.splitlines()[-1])
    if "refused" in told:
        raise ValueError(told["refused"])
    seconds = {}
    for name, at in told["marks"]:
        seconds[name], before = max(0.0, at - before), at
    return Start(kind, seconds, told["bytes"], told["compilations"], told["device"])


def rows(found: Sequence[Start]) -> list[tuple[str, ...]]:
    """(phase, cold, warm) in seconds, the warm column the median of its starts; then the weights' rate and the total."""
    cold, warm = ([s for s in found if s.kind == kind] for kind in ("cold", "warm"))

    def of(starts: list[Start], value: Any, unit: str = "") -> str:
        return f"{median(map(value, starts)):.2f}{unit}" if starts else ""

    table: list[tuple[str, ...]] = [
        (phase, *(of(kind, lambda s, p=phase: s.seconds[p]) for kind in (cold, warm))) for phase in PHASES
    ]
    table.append(("total", *(of(kind, lambda s: s.total) for kind in (cold, warm))))
    table.append(("weights, GB/s", *(of(kind, _rate) for kind in (cold, warm))))
    table.append(("compiled programs", *(str(max((s.compilations for s in kind), default="")) for kind in (cold, warm))))
    return table


def _rate(start: Start) -> float:
    return start.bytes / 1e9 / max(start.seconds["weights"], 1e-9)
