"""The 27B's decode round compiled for a card on any machine: launches, copies, buffers and bytes, none of it run.

    make check-27b                      # or: python benchmarks/check_27b.py [--target rtx4090] [--layers 64] [--json F]

Compiles two programs with the real shapes (no weights needed): `verify`, all rows of a round through the 64 layers to the
most likely tokens, and `decode_round`, the whole round with sampling and drafts. Checks them against what the engine promises
and exits with 1 where a promise is broken: at most 400 launches for `verify` and 430 for the round (outside branches), no
copy of weights, pages or states, everything donated reused.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from ninfer_jax import tables
from ninfer_jax.config import EngineConfig, preset, recipe
from ninfer_jax.config.engine import DRAFTERS
from ninfer_jax.model import TextModel
from ninfer_jax.programs import Programs
from ninfer_jax.programs.card import Compilation, Source, compile_program
from ninfer_jax.programs.verify import verify_rows
from ninfer_jax.state import state_shape
from pallas_kernels import deviceless, targets  # before the first JAX computation
from pallas_kernels.lab import registry, rows

MODEL, RECIPE, KV, CONTEXT = "qwen3_8_27b", "q4", "rk4v4-e8", 262_144
POOL = 360_448  # tokens that four slots share
NAMED = 248_077  # ids that the tokenizer has; the matrix has rows beyond them
MOST_LAUNCHES = {"verify": 400, "decode_round": 430}
_console = Console()


def verify_source(programs: Programs, kv: str) -> Source:
    """Rows through the layers to their most likely tokens: the state goes in donated and comes out with the new pages,
    states and records."""
    _, arguments, _ = programs.source("decode_round")

    def verify(parameters: Any, state: Any) -> Any:
        model = programs.build(parameters)
        slots = state.slots
        rows = jnp.concatenate([slots.token[:, None], jnp.maximum(slots.drafts, 0)], axis=1)
        hidden, state = verify_rows(model, state, rows, kv)
        _, ids = model.candidates(hidden.reshape(-1, hidden.shape[-1]), 1, NAMED)
        return state, ids, hidden

    return verify, arguments, (1,)


def ideal_bytes(programs: Programs, arguments: tuple[Any, ...]) -> dict[str, int]:
    """What a verify pass has to move: every weight but embedding and MTP head once, filled pages once (one slot at the whole
    context), recurrent states read once and written once. Activations, windows and records are not counted."""
    parameters, state = arguments
    roles = programs.roles()
    weights = sum(nbytes(x) for x, role in zip(parameters, roles, strict=True) if role not in ("embed", "mtp"))
    page = sum(nbytes(leaf) // leaf.shape[0] for pool in state.kv for leaf in jax.tree.leaves(pool))
    return {"weights": weights, "pages": page * (CONTEXT // 64), "states": 2 * sum(nbytes(x) for x in state.recurrent)}


def moved_bytes(kernels: Mapping[str, int], target: str) -> tuple[int, int]:
    """Bytes that the launches of a 16-row verify pass move, and the least they could: the lab's compiled figures of each
    kind of kernel times its launches."""
    known = {f"{c.op}/{c.name}": c for c in registry.cases()}
    gdn, attention = kernels["delta_decode_4"], kernels[f"kv_append_{KV.replace('-', '_')}"]
    counts = [
        (known["quantised_matmul_pair/delta.inputs"], gdn),
        (known["quantised_matmul/delta.out"], gdn),
        (known["quantised_matmul/attention.qkv_gate"], attention),
        (known["quantised_matmul/attention.out"], attention),
        (known["quantised_matmul/mlp.gate_up"], gdn + attention),
        (known["quantised_matmul/mlp.down"], gdn + attention),
        (known["head/argmax"], 1),
        (known[f"kv_append/decode.{KV}"], attention),
        (known[f"decode_attention/{KV}.4slots"], attention),
        (known["delta_decode/4x4"], gdn),
    ]
    moved = ideal = 0
    for case, launches in counts:
        row = rows.measure(case, target)
        moved, ideal = moved + launches * row.bytes_moved, ideal + launches * row.ideal_bytes
    return moved, ideal


def nbytes(leaf: Any) -> int:
    return leaf.size * leaf.dtype.itemsize


def copied_bytes(compiled: jax.stages.Compiled, smallest: int, besides: tuple[str, ...]) -> list[str]:
    """Copies of at least `smallest` bytes in the compiled text, of arrays whose dimensions ("4,7") are none of `besides`."""
    found = []
    for line in compiled.as_text().splitlines():
        name, _, rest = line.strip().partition(" = ")
        if " copy(" in rest or " copy-start(" in rest:
            dtype, _, dims = rest.partition("]")[0].lstrip("(").partition("[")
            width = {"bf16": 2, "f16": 2, "u8": 1, "s8": 1, "pred": 1, "s16": 2, "u16": 2}.get(dtype, 4)
            size = width
            for n in dims.split(","):
                size *= int(n or 1)
            if size >= smallest and dims not in besides:
                found.append(f"{name} {dtype}[{dims}]")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="rtx4090", help=f"one of {', '.join(targets.names())}")
    parser.add_argument("--layers", type=int, default=64, help="fewer make a quick look; the promises are for 64")
    parser.add_argument("--programs", default="verify,decode_round", help="which to compile, by commas")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--draft", type=int, default=3)
    parser.add_argument("--drafter", default="mtp", help=f"one of {', '.join(DRAFTERS)}")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    try:
        targets.get(options.target)
        deviceless.require_tools()
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    config = preset(MODEL)
    config = dataclasses.replace(config, layer_types=config.layer_types[: options.layers])
    engine = EngineConfig(
        context=CONTEXT, slots=options.slots, draft=options.draft, drafter=options.drafter, kv=KV, prefill_chunk=1024, pool=POOL
    )
    shape = state_shape(config, engine, KV, jnp.bfloat16)
    model = TextModel(config, jnp.bfloat16, mtp=shape.mtp, recipe=recipe(RECIPE))
    programs = Programs(model, shape, engine.prefill_chunk, NAMED, "cuda")
    failures, written = [], []
    for name in options.programs.split(","):
        source = verify_source(programs, KV) if name == "verify" else programs.source(name)
        with _console.status(f"compiling {name} ({options.layers} layers) for {options.target}"):
            compiled, facts = compile_program(name, source, options.target)
        state = source[1][1]
        donated = sum(nbytes(x) for x in jax.tree.leaves(state))
        # Of the draw, in branches: counts and logits over the vocabulary.
        vocabulary = f"{options.slots},{config.vocab_size}", f"{options.slots},{options.draft + 1},{config.vocab_size}"
        large = copied_bytes(compiled, 1 << 20, besides=vocabulary)
        ideal = ideal_bytes(programs, source[1][:2])
        show(facts, donated, large, ideal)
        written.append(facts.json() | {"donated_bytes": donated, "ideal": ideal, "large_copies": large})
        failures += [f"{name}: {failure}" for failure in promises(facts, donated, large)]
        if name == "verify" and (options.slots, options.draft) == (4, 3):
            with _console.status("compiling its kernels one by one"):
                moved, least = moved_bytes(facts.kernels, options.target)
            _console.print(f"bytes moved by its kernels: {moved:,}, {moved / least:.4f} of the ideal {least:,}")
            written[-1] |= {"kernel_bytes_moved": moved, "kernel_bytes_ideal": least}
    if options.json:
        options.json.write_text(
            json.dumps({"jax": jax.__version__, "layers": options.layers, "programs": written}, indent=1) + "\n"
        )
    for failure in failures:
        print(f"FAIL {failure}", file=sys.stderr)
    return 1 if failures else 0


def promises(facts: Compilation, donated: int, large: list[str]) -> list[str]:
    broken = []
    most = MOST_LAUNCHES.get(facts.name, facts.launches)
    if facts.launches > most:
        broken.append(f"{facts.launches} launches, at most {most} are allowed")
    if large:
        broken.append(f"{len(large)} copies of a MiB or more: {', '.join(large[:3])}")
    if facts.aliased_bytes != donated:
        broken.append(f"{facts.aliased_bytes:,} of {donated:,} donated bytes are reused")
    return broken


def show(facts: Compilation, donated: int, large: list[str], ideal: dict[str, int]) -> None:
    table = Table(title=f"{facts.name}, compiled for {facts.target} with jax {jax.__version__}, never run", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for label, value in (
        ("launches outside branches", facts.launches),
        ("launches in branches of conditionals", facts.branch_kernels),
        ("launches and copies by the shortest branches", facts.shortest),
        ("conditionals", facts.conditionals),
        ("small copies outside branches / in them", f"{facts.copies} / {facts.branch_copies}"),
        ("copies of 1 MiB or more, the draw's left out", len(large)),
        ("donated bytes", f"{donated:,}"),
        ("aliased bytes", f"{facts.aliased_bytes:,}"),
        ("argument bytes", f"{facts.argument_bytes:,}"),
        ("temporary bytes", f"{facts.temporary_bytes:,}"),
        *((f"ideal bytes of {k}", f"{v:,}") for k, v in ideal.items()),
        ("tracing and lowering, compiling (s, here)", f"{facts.lower_s:.0f}, {facts.compile_s:.0f}"),
    ):
        table.add_row(label, str(value))
    tables.show(_console, table)
    kernels = ", ".join(f"{name} {n}" for name, n in facts.kernels.most_common())
    _console.print(f"kernels: {kernels}")


if __name__ == "__main__":
    sys.exit(main())
