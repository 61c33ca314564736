"""Records what only a compiler can tell of the 27B, for plans without one: each program's workspace, and the executables' size.

    python benchmarks/record_workspace.py [--only N]      # needs the extra `aot`; about five minutes of two cores a row

Compiles the programs that serve, for a card that need not be here, for the configurations below: those that the ordered list of
docs/defaults.md begins with. Rows go into `ninfer_jax/planning/recorded.json` as soon as each is there; what is there
already, of this version of jax, stays.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from ninfer_jax.config import EngineConfig, preset, recipe
from ninfer_jax.config.presets import NAMED_IDS
from ninfer_jax.programs.executables import compile_to
from ninfer_jax.programs.plan import make_plan
from ninfer_jax.programs.setup import resolve
from pallas_kernels import deviceless

MODEL, FILE = "qwen3_8_27b", Path(__file__).parent.parent / "ninfer_jax/planning/recorded.json"
WHOLE = {"context": 262_144, "prefill_chunk": 1024, "drafter": "mtp"}
# (card, recipe, fields of EngineConfig)
ROWS: list[tuple[str, str | None, dict[str, Any]]] = [
    ("rtx4090", "q4", {"kv": "rk4v4-e8", "draft": 3, "slots": 1}),
    ("rtx4090", "q4", {"kv": "rk4v4-e8", "draft": 3, "slots": 4, "pool": 360_448}),
    ("rtx5090", "q4-quality", {"kv": "int8", "draft": 3, "slots": 1}),
    ("a100", "w8", {"kv": "bf16", "draft": 3, "slots": 1}),
    ("a100", None, {"kv": "bf16", "draft": 3, "slots": 1}),
    ("h200", None, {"kv": "bf16", "draft": 3, "slots": 4}),
    ("rtx4090", "q4", {"kv": "rk4v4-e8", "draft": 0, "slots": 1}),
]


def row(target: str, name: str | None, fields: dict[str, Any]) -> dict[str, Any]:
    engine = EngineConfig(**WHOLE | fields)
    setup = resolve(preset(MODEL), NAMED_IDS, engine, "cuda", recipe(name) if name else None)
    with tempfile.TemporaryDirectory() as folder:
        made = make_plan(setup, target, 0, compile_to(Path(folder), setup, target, progress=tell))
    shape = setup.shape
    return {
        "model": MODEL,
        "target": target,
        "jax": jax.__version__,
        "recipe": name,
        "kv": shape.kv,
        "draft": shape.draft,
        "drafter": shape.drafter,
        "slots": shape.slots,
        "context": shape.context,
        "pool": shape.pool_tokens,
        "prefill_chunk": setup.chunk,
        "workspace": dict(made.workspace),
        "executables": made.executables,
    }


def tell(name: str, done: int, total: int) -> None:
    print(f"{time.strftime('%H:%M:%S')}   {name} ({done + 1} of {total})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, metavar="N", help="the row of this number alone, from 0")
    options = parser.parse_args()
    deviceless.require_tools()
    for target in sorted({target for target, *_ in ROWS}):
        deviceless.start(target)
    for number, (target, name, fields) in enumerate(ROWS):
        if options.only not in (None, number):
            continue
        known = json.loads(FILE.read_text()) if FILE.exists() else []
        same = {"target": target, "recipe": name, "jax": jax.__version__} | fields
        if any(same == {key: old.get(key) for key in same} for old in known):
            continue
        print(f"{target}, {name or 'weights as they are'}, {fields}", flush=True)
        FILE.write_text(json.dumps([*known, row(target, name, fields)], indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
